"""`torchrun` on two hosts is the same program: network namespaces, each with an address of its own,
one with PostgreSQL, one rank on each. Losses are those of two ranks on one host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from support.proxy.servers import eventually
from support.store import postgres_server
from support.system import debian_packages
from support.trainer.kill_runs import fates, log_of, made, same, state_of, step_runs
from support.trainer.prepared_run import fill, save_smallest_model, settings_of

pytestmark = pytest.mark.timeout(600)

PORT = 29517
NETWORK = "10.77.0.0/24"
STEPS = 3
GROUPS = 8


def why_not() -> str | None:
    """Why namespaces cannot be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        debian_packages.install("iproute2")
    name = f"tg-try-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return None


@dataclass
class Host:
    """A namespace with loopback and one end of a cable."""

    name: str
    address: str
    device: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: list[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Whoever is in the namespace ends with it, also what left its session."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(30)
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if reason := why_not():
        pytest.skip(reason)
    tag = uuid.uuid4().hex[:6]
    pair = [Host(f"tg-{tag}-{i}", f"10.77.0.{i + 1}", f"tg{tag}{i}") for i in (0, 1)]
    try:
        for host in pair:
            ip("netns", "add", host.name)
        ip("link", "add", pair[0].device, "type", "veth", "peer", "name", pair[1].device)
        for host in pair:
            ip("link", "set", host.device, "netns", host.name)
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            ip("-n", host.name, "link", "set", host.device, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield pair
    finally:
        for host in pair:
            host.end()
            subprocess.run(["ip", "link", "delete", host.device], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass(frozen=True)
class Database:
    """An empty store's, as the hosts reach it over their cable, and as this process does."""

    url: str
    here: str


@pytest.fixture
def database(hosts: list[Host]) -> Iterator[Database]:
    """PostgreSQL on the first host."""
    folder = Path(tempfile.mkdtemp(prefix="tg-pg-"))
    try:
        postgres_server.stop(postgres_server.start(folder))  # makes the data
        rules = folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all all trust\nhost all all {NETWORK} trust\n")
        server = [str(postgres_server.programs() / "postgres"), "-D", str(folder / "data")]
        options = [f"listen_addresses={hosts[0].address}", f"unix_socket_directories={folder}"]
        flags = [word for option in options for word in ("-c", option)]
        as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        process = hosts[0].start([*as_nobody, *server, *flags], folder / "log")
        running = postgres_server.Server(folder, process)
        eventually(lambda: answers(running))
        here = running.new_database()
        over_the_cable = (
            f"postgresql://tests@{hosts[0].address}/{postgres_server.database_of(here)}"
        )
        yield Database(over_the_cable, here)
        postgres_server.stop(running)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answers(server: postgres_server.Server) -> bool:
    try:
        server.connect().close()
    except psycopg.OperationalError:
        return False
    return True


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *options]


PROGRAM = ["-m", "tracegrad_trainer.rl.offline_worker"]


def test_two_hosts_do_what_two_ranks_on_one_host_do(
    hosts: list[Host], database: Database, tmp_path: Path
) -> None:
    model = save_smallest_model(tmp_path / "model")

    # The same folder on both, as a shared file system is; rank 0 is where PostgreSQL is not.
    apart = written(model, tmp_path / "apart", database.url)
    fill(database.here, groups=GROUPS)
    running = []
    for node, host in enumerate(reversed(hosts)):
        command = torchrun(
            "--nnodes=2",
            f"--node-rank={node}",
            f"--rdzv-endpoint={hosts[1].address}:{PORT}",
            *PROGRAM,
            str(apart),
            f"--steps={STEPS}",
        )
        log = tmp_path / f"node-{node}.log"
        own = {"GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1"}
        running.append((host.start(command, log, **own), log))
    for process, log in running:
        assert process.wait(300) == 0, log.read_text()[-3000:]
    # Rank 0 says it, on whichever host the rendezvous put it.
    assert any("3 steps taken, now at step 3" in log.read_text() for _, log in running)

    together = written(model, tmp_path / "together", f"sqlite:///{tmp_path / 'one.db'}")
    fill(f"sqlite:///{tmp_path / 'one.db'}", groups=GROUPS)
    with step_runs() as runs:
        assert runs.run(together, ranks=2, steps=STEPS) == [0, 0], log_of(together)

    steps, wanted = made(database.here), made(f"sqlite:///{tmp_path / 'one.db'}")
    assert [step["step"] for step in steps] == [1, 2, 3]
    same(steps, wanted)
    assert all(step["batch"]["ranks"] == 2 for step in steps)
    assert fates(database.here) == fates(f"sqlite:///{tmp_path / 'one.db'}")
    last = "checkpoints/step-00000003"
    same(
        state_of(tmp_path / "apart" / last, tmp_path / "a.pt"),
        state_of(tmp_path / "together" / last, tmp_path / "b.pt"),
    )


def written(model: Path, state_dir: Path, url: str) -> Path:
    """The file of settings of a run with a new folder."""
    state_dir.mkdir()
    settings = settings_of(model, state_dir, proxy__store=url)
    file = state_dir / "settings.json"
    file.write_text(settings.model_dump_json())
    return file

"""`torchrun` on two hosts is the same program: network namespaces, each with an address of its own,
one with PostgreSQL, one rank on each. Losses are those of two ranks on one host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from support.proxy.servers import eventually
from support.store import postgres_server
from support.system import debian_packages
from support.trainer.char_model import save_char_model
from support.trainer.kill_runs import fates, log_of, made, same, state_of, step_runs
from support.trainer.prepared_run import fill, save_smallest_model, settings_of
from tracegrad.store import Store
from tracegrad_trainer.launch.run_state import read_state

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


# Attach mode, by the commands of docs/attach.md


PAGE = (Path(__file__).parents[2] / "docs" / "attach.md").read_text(encoding="utf-8")
SECRETS = {"TRACEGRAD_PROXY_CONTROL_KEY": "c" * 32}
ADMIN = {"TRACEGRAD_API_KEY": "a" * 32}
CPU = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# As small as other tests' runs. No rollout has a reward without the part that scorers give.
SMALL = """
[rewards]
weights = { reward = 1, done = 1 }
[rewards.commands]
done = "true"
[batches]
groups = 1
group_size = 2
[optim]
lr = 1e-2
[fsdp]
device = "cpu"
threads = 1
"""
AGENT = """
import sys, httpx
url, key, task = sys.argv[1:]
client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)
for n in range(2):
    me = {"rollout_id": f"{task}-{n}"}
    def tell(*events):
        client.post("/api/events", json={"events": [e | me for e in events]}).raise_for_status()
    tell({"type": "rollout_started", "task_id": task})
    messages = [{"role": "user", "content": "Say something."}]
    asked = {"model": "policy", "messages": messages, "max_tokens": 16}
    client.post(f"/rollouts/{task}-{n}/v1/chat/completions", json=asked).raise_for_status()
    ended = {"type": "rollout_finished", "outcome": "completed"}
    tell({"type": "reward", "value": float(n)}, ended)
"""


def block(name: str) -> str:
    """The page's, of the fence behind its mark."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", PAGE, re.S)
    assert found is not None, name
    return found[1]


@pytest.mark.vllm
def test_ranks_push_over_the_network_to_servers_that_run_already(
    hosts: list[Host], database: Database, tmp_path: Path
) -> None:
    serving, training = hosts
    model = save_char_model(tmp_path / "model")
    shared = tmp_path / "shared"
    shared.mkdir()
    names = {
        "/srv/tracegrad": str(shared),
        "Qwen/Qwen3-0.6B": str(model),
        "10.0.0.1": serving.address,
        "10.0.0.2": training.address,
        "16384": "512",
        "--nproc-per-node 8": "--nproc-per-node 1",
    }

    def here(text: str) -> str:
        for name, own in names.items():
            text = text.replace(name, own)
        return text

    (shared / "tracegrad.toml").write_text(here(block("settings")) + SMALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    store = {"TRACEGRAD_STORE": database.url, "PATH": path}

    def start(host: Host, script: str, log: str, **env: str) -> subprocess.Popen[bytes]:
        command = ["bash", "-c", here(script)]
        return host.start(command, tmp_path / log, **{**CPU, "PATH": path, **env})

    def serve_engine() -> subprocess.Popen[bytes]:
        # It sees nothing of what ranks write: weights can only come over the network.
        hide = "mount -t tmpfs tmpfs /srv/tracegrad && mount -t tmpfs tmpfs /dev/shm && "
        script = hide + "exec env " + block("vllm").strip() + " " + block("cpu")
        return start(serving, script, "vllm.log", GLOO_SOCKET_IFNAME=serving.device)

    engine = serve_engine()
    start(serving, block("proxy"), "proxy.log", **store, **SECRETS, **ADMIN)
    workers = start(training, "exec " + block("workers"), "workers.log", **store)
    nodes = []
    for node, host in enumerate((training, serving)):
        script = block("ranks").replace("eth1", host.device)
        script = script.replace("--node-rank 0", f"--node-rank {node}")
        nodes.append(start(host, script, f"node-{node}.log", **store, **SECRETS))

    def work(task: str) -> None:
        url, key = f"http://{serving.address}:4141", ADMIN["TRACEGRAD_API_KEY"]
        agent = [sys.executable, "-c", AGENT, url, key, task]
        log = tmp_path / "agent.log"
        assert training.start(agent, log).wait(150) == 0, log.read_text()[-2000:]

    def served() -> int | None:
        with Store.open(database.here) as opened:
            return opened.current_version()

    def logs() -> str:
        return "\n".join(f"{f.name}: {f.read_text()[-2500:]}" for f in tmp_path.glob("*.log"))

    def awaited(what: Callable[[], bool], within_s: float = 150) -> None:
        try:
            eventually(what, within_s)
        except AssertionError as error:
            raise AssertionError(logs()) from error

    def command(*words: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", training.name, *words, f"--state-dir={shared / 'state'}"],
            env={**os.environ, **store},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr + logs()
        return done.stdout

    awaited(lambda: served() == 0)
    for step in (1, 2):
        work(f"task-{step}")
        awaited(lambda step=step: served() == step)
    status = json.loads(command("trainer", "status", "--json"))
    assert (status["stage"], status["absent_workers"]) == ("serving", [])
    assert list(status["scorings"]) == ["done"]
    command("trainer", "rollback", "1", "--why", "worse", "--wait=60")
    awaited(lambda: (served() or 0) > 2)  # the ranks begin again, under a new number
    newest = served()

    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait(30)
    serve_engine()
    work("after")  # waits for the weights
    with Store.open(database.here) as opened:
        [turn] = opened.rollout_turns("after-0")
        versions = opened.versions()
    assert {version for version, _ in turn.policy_versions} == {newest}
    assert all(v.detail["gap"]["max"] < 1e-4 for v in versions if v.detail.get("gap"))
    pushed = [v.detail["seconds"] for v in versions if v.detail.get("seconds")]
    print("seconds of pushes over the network:", [round(sum(s.values()), 2) for s in pushed])

    state = read_state(shared / "state", "ranks")
    assert state is not None
    os.kill(state["pid"], signal.SIGTERM)
    assert [node.wait(90) for node in nodes] == [0, 0], logs()
    workers.send_signal(signal.SIGTERM)
    assert workers.wait(90) == 0, logs()

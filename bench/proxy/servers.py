"""The processes of a run: started, watched through /proc, stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class DidNotStart(Exception):
    """The message ends with what the process said last."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process and its children: CPU seconds since they began, resident bytes now."""

    cpu_s: float
    rss: int


class Server:
    """A process that listens on `port`; it stops at the end of the `with`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self.log = folder / f"{name}.log"
        self._command = command
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None, "entered first"
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        """Until it listens. Raises DidNotStart."""
        assert self._process is not None, "entered first"
        deadline = time.monotonic() + START_LIMIT_S
        while not listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise DidNotStart(f"{self.name} did not start:\n{tail}")
            time.sleep(0.1)

    def usage(self) -> Usage:
        assert self._process is not None, "entered first"
        found = [_usage(pid) for pid in _family(self._process.pid)]
        return Usage(sum(one.cpu_s for one in found), sum(one.rss for one in found))


def listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _family(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [
            int(child) for task in tasks for child in (task / "children").read_text().split()
        ]
    except OSError:  # it ended meanwhile
        return []
    return [pid, *(member for child in children for member in _family(child))]


def _usage(pid: int) -> Usage:
    try:
        # The second field is a name in brackets that may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Usage(0.0, 0)
    return Usage((int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE)

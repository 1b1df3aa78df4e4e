"""`tracegrad proxy` as a process of its own, which a test can kill and start again."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import httpx

from support.system.module_environment import environment
from tracegrad_trainer.utils.network import find_free_port

_START_S = 60.0


class ProxyProcess:
    """On the same port each time; forked from a process that has loaded the command already."""

    def __init__(
        self,
        upstream: str,
        store_url: str,
        log: Path,
        constants: Mapping[str, float] | None = None,
        **settings: object,
    ) -> None:
        """`settings` are the proxy's, by their names. `constants`: those of its modules
        (`package.module.NAME`) that are others in this process."""
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.upstream = upstream
        self.log = log
        self._command = ["proxy", f"--port={self.port}", f"--upstream={upstream}"]
        self._command += [f"--store={store_url}"]
        self._pid: int | None = None
        self._constants = dict(constants or {})
        variables = {f"TRACEGRAD_PROXY_{name.upper()}": str(v) for name, v in settings.items()}
        self._environment = {**environment(), **variables}

    def start(self) -> None:
        """Ready on return."""
        nursery = _nursery()
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        wanted: dict[str, object] = {
            "arguments": self._command,
            "environment": self._environment,
        }
        wanted |= {"constants": self._constants, "log": str(self.log)}
        nursery.stdin.write(json.dumps(wanted) + "\n")
        nursery.stdin.flush()
        self._pid = int(nursery.stdout.readline())
        deadline = time.monotonic() + _START_S
        while not self._answers():
            waits = self.runs and time.monotonic() < deadline
            assert waits, self.log.read_text()[-2000:]
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        """Of the process that was started: with several workers, of their supervisor."""
        assert self._pid is not None
        return self._pid

    @property
    def runs(self) -> bool:
        if self._pid is None:
            return False
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; gone on return."""
        assert self.runs, f"the proxy ended by itself\n{self.log.read_text()[-2000:]}"
        self._end()

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._pid is not None and self.runs:
            os.kill(self._pid, signal.SIGKILL)
            while self.runs:
                time.sleep(0.001)
        self._pid = None

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@cache
def _nursery() -> subprocess.Popen[str]:
    """One for all tests of this process: loading all of the command takes a second or more."""
    command = [sys.executable, "-m", "support.proxy.fork_server"]
    nursery = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )

    def end() -> None:
        nursery.kill()
        nursery.communicate()

    atexit.register(end)
    return nursery

"""`trainer serve` under a parent that starts it again, and keeps its port open meanwhile, as an
init system does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from tests.support.store import postgres_crash

from tracegrad_trainer.launch.run_state import read_state

# The shell is replaced by the command, so that LISTEN_PID is the command's.
_START = 'exec 3<&"$0" && LISTEN_PID=$$ exec "$@"'
STOP_S = 120.0
_POLL_S = 0.1


class KeptServe:
    """A context; `pid` is the present one's."""

    def __init__(
        self,
        listener: socket.socket,
        model: Path,
        state_dir: Path,
        settings: Mapping[str, object],
        database: postgres_crash.Crashing,
    ) -> None:
        """`database`: the store's server."""
        self.database = database
        self.state_dir = state_dir
        self._listener = listener
        port = listener.getsockname()[1]
        every = {"model": model, "state_dir": state_dir, "proxy.port": port, **settings}
        sets = [f"--set={name}={value}" for name, value in every.items()]
        command = [sys.executable, "-m", "tracegrad_trainer", "serve", *sets]
        self._command = ["sh", "-c", _START, str(self._listener.fileno()), *command]
        self.ends: list[int] = []  # exit codes
        self._ending = False
        self._watch = threading.Thread(target=self._keep, name="kept-serve", daemon=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> KeptServe:
        self._start()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._watch.join()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def is_serving(self) -> bool:
        """Whether everything is up."""
        state = self._state()
        parts: dict[str, Any] = state.get("parts", {})
        up = all(part["up"] for part in parts.values())
        return state.get("pid") == self.pid and state.get("stage") == "serving" and up

    def starts(self) -> tuple[int, int]:
        """Of `trainer serve`, and of its parts since then: another pair than before says that a
        kill was noticed."""
        parts: dict[str, Any] = self._state().get("parts", {})
        return len(self.ends), sum(part["restarts"] for part in parts.values())

    def doing(self) -> str:
        """What the ranks do now."""
        return str((read_state(self.state_dir, "ranks") or {}).get("stage", "starting"))

    def pid_of(self, victim: str) -> int | None:
        """`serve`, `vllm`, `engine` (vLLM's largest child), `proxy`, `rank 0`, `rank 1`; None: it
        is not there now."""
        if victim == "serve":
            return self.pid
        try:
            below = psutil.Process(self.pid).children(recursive=True)
            return _found(victim, below)
        except psutil.Error:
            return None

    def _state(self) -> dict[str, Any]:
        return read_state(self.state_dir, "serve") or {}

    def _start(self) -> None:
        log = self.state_dir / "logs" / "kept_serve.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LISTEN_FDS": "1"},
                pass_fds=[self._listener.fileno()],
                start_new_session=True,
            )

    def _keep(self) -> None:
        while not self._ending:
            if (code := self._process.poll()) is not None:
                self._start()
                self.ends.append(code)  # last: who sees another end finds the next process
            time.sleep(_POLL_S)


def _found(victim: str, below: list[psutil.Process]) -> int | None:
    lines = {process.pid: " ".join(process.cmdline()) for process in below}
    if victim.startswith("rank"):
        ranks = sorted(pid for pid, line in lines.items() if "rl.serve_worker" in line)
        # torch's launcher names the program too, and comes first.
        workers = [pid for pid in ranks if "torch.distributed.run" not in lines[pid]]
        number = int(victim.split()[1])
        return workers[number] if number < len(workers) else None
    marks = {"vllm": "vllm.entrypoints", "proxy": "tracegrad.cli"}
    if victim in marks:
        return next((pid for pid, line in lines.items() if marks[victim] in line), None)
    server = _found("vllm", below)
    if server is None:
        return None
    engines = psutil.Process(server).children()
    return max(engines, key=lambda one: one.memory_info().rss).pid if engines else None

"""Child processes that never outlive us: started in a session of their own, watched, stopped.

A session of its own keeps a terminal's Ctrl-C away from the child: whoever started it decides
the order in which things stop. The kernel ends the child when its parent dies in any other way
(PR_SET_PDEATHSIG), and `stop` ends the whole process group, grandchildren included.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from tracegrad.log_format import as_text
from tracegrad.private_files import open_private, private_folder
from tracegrad.urls import http_base
from tracegrad_trainer.utils.network import http_client

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: dlopen after it may deadlock

# What settings are read from, keys and passwords among them: a child gets its part resolved.
_SETTINGS = ("TRACEGRAD_PROXY_", "TRACEGRAD_TRAINER_", "TRACEGRAD_API_KEY", "TRACEGRAD_STORE")
ENGINE_KEY_VARIABLE = "VLLM_API_KEY"
# In logs: what torch puts before a rank's lines, and an error's class.
_RANK = re.compile(r"^\[rank\d+\]: ?")
# How gloo and NCCL say that another rank is gone: why it went is that rank's to say.
_PEER_LOST = re.compile(r"Connection (closed|reset) by peer|ncclRemoteError|remote process exited")
_LAUNCHERS = "ChildFailedError"  # of torch's launcher, about an error that stands before it
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class ChildError(RuntimeError):
    """A child did not start or did not stay; the message is one line for the user."""


class ChildProcess:
    """One supervised process; what it prints goes to `log`.

    Of our own environment it has all but the variables of settings: `env` has those that it needs,
    so that no child holds a key that it has no use for. Nothing that lies in the working directory
    is imported in place of a library. `orphaned` is the signal that it gets when we die without
    stopping it; `pass_fds` are open in it too, under the same numbers. It may be started again once
    it has ended.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        nice: int = 0,
        orphaned: signal.Signals = signal.SIGTERM,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.env = {**inherited_environment(), "PYTHONSAFEPATH": "1", **(env or {})}
        self.nice = nice
        self.orphaned = orphaned
        self.pass_fds = tuple(pass_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # what an earlier process of this name printed comes before

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        private_folder(self.log.parent)

        def prepare() -> None:
            die_with_parent(self.orphaned)
            os.nice(self.nice)

        with open_private(self.log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
                pass_fds=self.pass_fds,
                preexec_fn=prepare,
            )

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll() if self._process else None

    def check(self) -> None:
        """Raises ChildError, one clear line, if the process has ended."""
        code = self.exit_code()
        if code is None:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        words = self._last_words() + self._full_disk()
        raise ChildError(f"{self.name} (pid {self.pid}) {how}{words}")

    def wait_until_ready(
        self, ready: Callable[[], bool], *, timeout_s: float, tick: Callable[[], None] | None = None
    ) -> float:
        """Polls `ready` until it is true; returns the seconds that took. Raises ChildError.

        `tick` is called between the polls: the place for a line of progress, or to give up.
        """
        started = time.monotonic()
        while not ready():
            self.check()
            if time.monotonic() - started > timeout_s:
                raise ChildError(
                    f"{self.name} is not ready after {timeout_s:.0f} s{self._last_words()}"
                )
            if tick is not None:
                tick()
            time.sleep(0.1)
        return time.monotonic() - started

    def stop(self, *, grace_s: float = 10) -> None:
        """SIGTERM, then SIGKILL after `grace_s`, to the whole process group."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        self._end_within(grace_s)

    def stop_by(self, leader: int, *, grace_s: float) -> None:
        """As `stop`, but that SIGTERM goes to one process alone, which the others end with."""
        if self._process is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(leader, signal.SIGTERM)
        self._end_within(grace_s)

    def kill(self) -> None:
        """SIGKILL to the whole process group. Nothing is waited for: signal handlers call this."""
        if self._process is not None:
            self._signal(signal.SIGKILL)

    def _end_within(self, grace_s: float) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        # Also when the leader is gone: its children may have stayed behind.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        """The last log line that is not empty, and where the rest is."""
        lines = [line.strip() for line in self.logged().splitlines() if line.strip()]
        errors = traceback_errors(lines[-200:])
        errors = [line for line in errors if not _PEER_LOST.search(line)] or errors
        last = errors[-1] if errors else lines[-1] if lines else ""
        if (self.exit_code() or 0) < 0:
            last = ""  # killed: its last line is about something else
        return f": {last[-300:]} (log: {self.log})" if last else f" (log: {self.log})"

    def logged(self, *, last: int | None = None) -> str:
        """What this process has printed so far, JSON lines as text; `last`: so many bytes of it at
        most."""
        try:
            with self.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(self._log_start if last is None else max(self._log_start, end - last))
                return as_text(log.read().decode(errors="replace"))
        except OSError:
            return ""

    def _full_disk(self) -> str:
        """A process that ends because of a full disk cannot write so into its log."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.log.parent).free < 1 << 20:
                return f"; the disk of {self.log.parent} is full"
        return ""


def die_with_parent(number: signal.Signals) -> None:
    """The kernel sends this process `number` when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def is_responding(url: str, path: str = "") -> bool:
    """Whether a server of ours is up: it answers with 200 at `path` under `url`."""
    return why_silent(url, path) is None


def why_silent(url: str, path: str = "") -> str | None:
    """Why it is not up; None: it is."""
    try:
        with http_client(url, timeout_s=2) as client:
            status = client.get(http_base(url) + path).status_code
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    return None if status == 200 else f"it answers {status}"


def inherited_environment() -> dict[str, str]:
    """Ours, but for the variables of settings."""
    names = (name for name in os.environ if not name.startswith(_SETTINGS))
    return {name: os.environ[name] for name in names if name != ENGINE_KEY_VARIABLE}


def traceback_errors(lines: Sequence[str]) -> list[str]:
    """The last lines of Python's tracebacks; a traceback's other lines are none."""
    # torch puts its rank before each line of what a process of many dies of.
    plain = (_RANK.sub("", line) for line in lines)
    heads = ((line, line.split(":", 1)[0]) for line in plain)
    ends = ("Error", "Exception", "Failed", "Exit")
    named = ((line, head) for line, head in heads if _NAME.fullmatch(head))
    return [line for line, head in named if head.endswith(ends) and not head.endswith(_LAUNCHERS)]

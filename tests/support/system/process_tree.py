"""Every process that comes from one that a test started, and whether it is gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil


class ProcessTree:
    """`root` and all its descendants, also those whose parent has died meanwhile.

    A thread looks again and again, by pid and start time: a pid that is taken anew is another
    process, and one that was seen once is remembered wherever it is moved to.
    """

    def __init__(self, root: int) -> None:
        self.members = {psutil.Process(root)}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def alive(self) -> list[psutil.Process]:
        self._look()
        return [member for member in list(self.members) if _runs(member)]

    def gone(self, within_s: float) -> list[str]:
        """What is left of it after `within_s` seconds; [] as soon as nothing is."""
        psutil.wait_procs(self.alive(), timeout=within_s)
        return [_told(member) for member in self.alive()]

    def end(self) -> None:
        """SIGKILL to all that is left: no test leaves processes behind."""
        self._over.set()
        self._thread.join()
        for member in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for member in list(self.members):
                self.members.update(_children(member))


def _children(process: psutil.Process) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running():
            yield from process.children(recursive=True)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _told(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    return str(process.pid)

"""Which process a container belongs to, so that another one may know whether that still runs.

A process is named by its number, when it began, its PID namespace and the machine's boot: numbers
are given out again, and several machines or containers may share one engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

OWNER_LABEL = "tracegrad.owner"
RUN_LABEL = "tracegrad.run"
_START_TIME_FIELD = 19  # of /proc/PID/stat, counted behind the name in brackets: field 22


@dataclass(frozen=True, slots=True)
class SandboxOwner:
    """`boot`: the machine's boot id. `namespace`: of the process numbers. `started`: clock ticks
    after the boot."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def this_process(cls) -> SandboxOwner:
        started = _started(os.getpid())
        assert started is not None, "/proc has no entry for this process"
        return cls(_boot(), _namespace(), os.getpid(), started)

    @classmethod
    def parse(cls, label: str) -> SandboxOwner | None:
        """None: nobody of ours wrote it."""
        try:
            boot, namespace, pid, started = label.split(":")
            return cls(boot, namespace, int(pid), int(started))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.boot}:{self.namespace}:{self.pid}:{self.started}"

    def is_dead(self) -> bool | None:
        """None: it cannot be seen from here. Before this boot, or elsewhere."""
        if (self.boot, self.namespace) != (_boot(), _namespace()):
            return None
        return _started(self.pid) != self.started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    # pid:[4026531836]
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie's end is only not yet noticed.
    return None if fields[0] in "ZX" else int(fields[_START_TIME_FIELD])

"""Host memory: what is left of it, and what was freed goes back to the system.

glibc keeps what is freed between pieces that are still used: bodies of calls and tensors of ever
other sizes leave holes that the next ones do not fit, and a process that needs no more grows for
hours. Giving whole free pages back takes milliseconds; other C libraries do it by themselves.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

RETURN_EVERY_S = 60.0


def return_freed_memory() -> None:
    """Whole free pages of all of malloc's arenas. 1 to 20 ms; nothing where this is no glibc."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


async def keep_returning_memory() -> None:
    """Once a minute, until it is cancelled."""
    while True:
        await asyncio.sleep(RETURN_EVERY_S)
        return_freed_memory()


@cache
def _malloc_trim() -> Any | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def free_host_memory() -> int:
    """Bytes that this machine, or the container we are in, has left."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):  # free, or at once to be had from caches
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    left = free_cgroup_memory(Path("/sys/fs/cgroup"))
    return available if left is None else min(available, left)


def free_cgroup_memory(group: Path) -> int | None:
    """Bytes that a control group (v2) has left, caches of files counted as free; None: no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None  # not Linux, or no such limits

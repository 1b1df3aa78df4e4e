"""Host memory: what is left of it, how a server that runs for weeks takes
it from the system, and how what was freed goes back.

glibc keeps what is freed between pieces that are still used: bodies of calls and tensors of ever
other sizes leave holes that the next ones do not fit, and a process that needs no more grows for
hours. Giving whole free pages back takes milliseconds; other C libraries do it by themselves.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from functools import cache
from pathlib import Path
from typing import Any

RETURN_EVERY_S = 60.0
# Where the C library would have eight a core.
ARENAS = 2
_M_ARENA_MAX = -8  # glibc's malloc.h


def return_freed_memory() -> None:
    """Whole free pages of all of malloc's arenas. 1 to 20 ms; nothing where this is no glibc."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


async def keep_returning_memory() -> None:
    """Once a minute, until it is cancelled."""
    while True:
        await asyncio.sleep(RETURN_EVERY_S)
        return_freed_memory()


def limit_arenas() -> None:
    """Call it before threads start; processes that are forked afterwards have the same limit.

    glibc gives each thread an arena of its own, and what is freed in one no other can use: the
    store's threads, which take turns, would hold several times what any of them needs, and the
    process would grow for half an hour. More arenas would gain little, as Python runs one thread at
    a time. What the environment says of arenas is left as it is. Other C libraries have none.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)


def tune_gc() -> None:
    """Every answer is parsed into a thousand objects that are soon dropped, none in a cycle.

    By default Python would look through all memory for cycles again and again meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


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
    group = Path("/sys/fs/cgroup")
    left = [free_cgroup_memory(group), free_cgroup_v1_memory(group / "memory")]
    return min([available, *(each for each in left if each is not None)])


def free_cgroup_memory(group: Path) -> int | None:
    """Bytes that a control group (v2) has left, caches of files counted as free; None: no limit."""
    return _left(group, "memory.max", "memory.current", "inactive_file")


def free_cgroup_v1_memory(group: Path) -> int | None:
    """As `free_cgroup_memory`; without a limit it has more left than any machine has."""
    files = "memory.limit_in_bytes", "memory.usage_in_bytes"
    return _left(group, *files, "total_inactive_file")


def _left(group: Path, limit: str, used: str, cached: str) -> int | None:
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        numbers = (int((group / file).read_text()) for file in (limit, used))
        return next(numbers) - next(numbers) + int(stat[cached])
    except (OSError, ValueError, KeyError):
        return None  # not Linux, or no such limits: "max"

"""Host memory that is left: of the machine, or of the container that we are in."""

from __future__ import annotations

import os
from pathlib import Path


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

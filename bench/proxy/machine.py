"""The machine and the versions that a table was made with; nothing that names the machine."""

from __future__ import annotations

import os
import platform
import resource
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.pages import ROOT

_TICKS = os.sysconf("SC_CLK_TCK")


def description(packages: Sequence[str]) -> list[str]:
    """Lines of text: the machine, the versions of what matters, our own."""
    versions = ", ".join(_named_version(name) for name in packages)
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return [
        f"{cores} cores of {_processor()}, {_memory_gib():.0f} GiB of memory, {system}",
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {versions}",
        f"tracegrad {version('tracegrad')} ({commit()})",
    ]


def _named_version(package: str) -> str:
    """vLLM's builds for CPUs are a package of another name."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package}-cpu {version(f'{package}-cpu')}"


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    # user, nice, system, idle, iowait, irq, softirq, steal: what is neither idle nor waiting.
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def ran(start: float, busy: float) -> list[str]:
    """The date, how long it took and what others had, since `time.monotonic()` and `busy_s()` said
    this. Of our own children those count that have ended."""
    wall_s = time.monotonic() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(one.ru_utime + one.ru_stime for one in used)
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, in {wall_s / 60:.0f} minutes",
        others(busy_s() - busy, own, wall_s),
    ]


def others(busy: float, ours: float, wall_s: float) -> str:
    """How much of the machine other processes had: with much of it the table is worth little."""
    share = max(busy - ours, 0.0) / (wall_s * os.sysconf("SC_NPROCESSORS_ONLN"))
    return f"other processes had {share:.0%} of the machine meanwhile"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    total: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total / (1 << 30)


def commit() -> str:
    git = ["git", "-C", str(ROOT)]
    head_of = [*git, "rev-parse", "--short", "HEAD"]
    try:
        head = subprocess.run(head_of, capture_output=True, text=True)
    except FileNotFoundError:
        return "no git here"
    if head.returncode != 0:
        return "not a git checkout"
    # Pages are what is written here: a picture may be there before its page.
    code = [*git, "status", "--porcelain", "--", ".", ":(exclude)docs"]
    changes = subprocess.run(code, capture_output=True, text=True)
    return f"commit {head.stdout.strip()}" + (", with changes" if changes.stdout else "")

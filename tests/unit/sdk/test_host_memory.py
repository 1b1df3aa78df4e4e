"""Freed memory is given back; holes between what is used are no reason to grow."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Every second of many blocks is freed: the break stays where it is, the pages need not.
HOLES = """
from pathlib import Path
from tracegrad.host_memory import return_freed_memory

def own():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous")).split()[1])

blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
blocks[::2] = [None] * 500
before = own()
return_freed_memory()
print(before - own())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries give it back")
def test_pages_between_blocks_that_are_used_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30_000, "KiB, of 50 MB"

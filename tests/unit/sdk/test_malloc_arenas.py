"""How many arenas glibc makes for a process's threads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas"
)

# Threads that allocate at the same moment, then what malloc says of itself.
_THREADS = """
import ctypes, sys, threading
from tracegrad.host_memory import limit_arenas

if "limit" in sys.argv:
    limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fdopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
together = threading.Barrier(6)

def allocate():
    together.wait()
    assert libc.malloc(10_000)
    together.wait()  # an arena is another's when its thread has ended

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


def arenas(*arguments: str, **environment: str) -> int:
    inherited = {n: value for n, value in os.environ.items() if n != "MALLOC_ARENA_MAX"}
    run = subprocess.run(
        [sys.executable, "-c", _THREADS, *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.count("<heap nr=")


def test_threads_share_two_arenas() -> None:
    assert arenas("limit") == 2


def test_without_the_limit_each_thread_has_its_own() -> None:
    assert arenas() > 2


def test_the_environment_has_the_last_word() -> None:
    assert arenas("limit", MALLOC_ARENA_MAX="3") == 3

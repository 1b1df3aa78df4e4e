"""How this process collects its garbage and gets memory from the system: for a server that runs for
weeks, with threads."""

from __future__ import annotations

import ctypes
import gc
import os

# Where the C library would have eight a core.
ARENAS = 2
_M_ARENA_MAX = -8  # glibc's malloc.h


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

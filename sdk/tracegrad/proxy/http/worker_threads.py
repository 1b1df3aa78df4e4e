"""Threads for what large requests need: the event loop goes on serving the others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

# Bytes. To read a body of this size takes a few milliseconds; a thread costs a tenth of one.
LARGE_BODY_BYTES = 256 << 10
# More would only compete for Python's one lock; what waits is bounded by the memory for bodies.
THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThreads:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tracegrad-large")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """What `work` returns: at once for a request of at most `LARGE` bytes, else from a
        thread."""
        if size <= LARGE_BODY_BYTES:
            return work(*args, **more)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **more))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

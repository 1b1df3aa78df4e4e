"""The store as the event loop meets it: in another thread, and not waited for beyond measure."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from time import monotonic
from typing import ParamSpec, TypeVar

from tracegrad.store import Submission
from tracegrad.store.databases import BUSY_TIMEOUT_S
from tracegrad.store.errors import StoreLost, StoreUnavailable

# A little more than the store itself waits for others: what it says of them is worth more. Beyond
# that it is a server that hangs, or writes that wait behind others which wait.
STORE_TIMEOUT_S = BUSY_TIMEOUT_S + 5.0
# A server that is started again is back by then: calls wait for it, and are no errors.
RECONNECT_S = 15.0
_RECONNECT_EVERY_S = 0.25
# More for a commit that was sent already: whether it is stored is then not ours to say.
COMMIT_TIMEOUT_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(method: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """What a method of the store returns; it is asked again for RECONNECT_S while the store's
    server is gone. Raises what it raises, and as `within_store_timeout`."""
    return await run_in(None, method, *args, **more)


async def run_in(
    threads: Executor | None, method: Callable[P, T], *args: P.args, **more: P.kwargs
) -> T:
    """As `run_in_thread`, in threads of one's own; None: in those that calls use."""
    return await within_store_timeout(_reconnecting(threads, partial(method, *args, **more)))


async def _reconnecting(threads: Executor | None, method: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    deadline = monotonic() + RECONNECT_S
    while True:
        try:
            run = contextvars.copy_context().run
            return await loop.run_in_executor(threads, run, method)
        except StoreLost:
            if monotonic() > deadline:
                raise
        await asyncio.sleep(_RECONNECT_EVERY_S)


async def within_store_timeout(answer: Awaitable[T]) -> T:
    """Raises StoreUnavailable after STORE_TIMEOUT_S. What was asked for may still be done later."""
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            return await answer
    except TimeoutError:
        raise StoreUnavailable(_silent(STORE_TIMEOUT_S)) from None


async def wait_committed(submission: Submission, *, patience_s: float | None = None) -> None:
    """On return it is on the disk. Raises what the submission fails with, and StoreUnavailable
    after `patience_s` (STORE_TIMEOUT_S): then none of its turns will be trained, whatever the store
    does later."""
    patience_s = STORE_TIMEOUT_S if patience_s is None else patience_s
    try:
        async with asyncio.timeout(patience_s):
            return await asyncio.wrap_future(submission)
    except TimeoutError:
        submission.withdraw(_silent(patience_s))
    try:
        async with asyncio.timeout(COMMIT_TIMEOUT_S):
            return await asyncio.wrap_future(submission)
    except TimeoutError:
        if submission.abandon():
            raise StoreUnavailable(_silent(patience_s + COMMIT_TIMEOUT_S)) from None
        return await asyncio.wrap_future(submission)


def _silent(seconds: float) -> str:
    return f"the store has not answered for {seconds:g} s"

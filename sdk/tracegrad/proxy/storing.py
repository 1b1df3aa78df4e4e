"""The store as the event loop meets it: in another thread, and not waited for beyond measure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from tracegrad.store.databases import BUSY_TIMEOUT_S
from tracegrad.store.errors import StoreUnavailable

# A little more than the store itself waits for others: what it says of them is worth more. Beyond
# that it is a server that hangs, or writes that wait behind others which wait.
PATIENCE_S = BUSY_TIMEOUT_S + 5.0

P = ParamSpec("P")
T = TypeVar("T")


async def asked(method: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """What a method of the store returns. Raises what it raises, and as `in_time`."""
    return await in_time(asyncio.to_thread(method, *args, **more))


async def in_time(answer: Awaitable[T]) -> T:
    """Raises StoreUnavailable after `PATIENCE_S`. What was asked for may still be done later."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await answer
    except TimeoutError:
        raise StoreUnavailable(f"the store has not answered for {PATIENCE_S:g} s") from None

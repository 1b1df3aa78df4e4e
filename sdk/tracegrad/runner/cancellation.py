"""Ends that are not left half done: each cancellation that comes meanwhile waits for them, too.

There may be several: an attempt is cut, or out of time, and then the whole run is interrupted. What
was merely shielded would go on alone, and be cancelled with the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """What it raises is raised; a cancellation is raised when it has ended, and goes before."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await _ended(task)
        raise


async def cancelled(running: asyncio.Task[Any]) -> None:
    """Until it has ended what it runs. Raises nothing of its own: whoever awaited it has that."""
    running.cancel()
    await to_its_end(_ended(running))


async def _ended(task: asyncio.Task[Any]) -> None:
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # taken: nobody logs it

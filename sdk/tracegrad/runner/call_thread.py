"""A thread that makes one caller's calls, one after another, while the event loop goes on: those of
an agent's attempt, or of an environment."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Self, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Context, asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class CallThread:
    """`with CallThread(name) as thread: await thread.call(function)`.

    A call that never returns is left to itself: nobody waits for its thread, not at the end of the
    process either, as `concurrent.futures` would.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.put(None)

    async def call(self, function: Callable[[], T]) -> T:
        """In the caller's context. A cancellation does not end it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put((function, copy_context(), loop, done))
        return await done

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, context, loop, done = job
            value, failure = None, None
            try:
                value = context.run(function)
            except BaseException as error:  # also SystemExit: whoever waits would wait for ever
                failure = error
            try:
                loop.call_soon_threadsafe(_settle, done, value, failure)
            except RuntimeError:  # the loop has closed, and nobody waits
                return
            del job, function, value, failure, done


def _settle(done: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if done.done():  # cancelled
        return
    if isinstance(failure, StopIteration) or not isinstance(failure, Exception | None):
        # No future takes the one, and what would end the process must not end the loop.
        failure = RuntimeError(f"{type(failure).__name__}: {failure}")
    if failure is None:
        done.set_result(value)
    else:
        done.set_exception(failure)

"""A rollout follows its code into threads: `ThreadPoolExecutor` (also `run_in_executor`),
multiprocessing's `ThreadPool` and `threading.Thread`. Asyncio's tasks and `asyncio.to_thread` do so
by themselves.

What an executor or a pool runs belongs to whoever submitted it. A thread belongs to the rollout
that it was started in (as every thread does in Python 3.14 with `-X thread_inherit_context=1`),
until that rollout is finished: what a worker of many rollouts does afterwards is nobody's.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any

from tracegrad import context
from tracegrad.http_patching import replace_method
from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")


def install() -> None:
    """Wrap both, once a process."""
    replace_method(threading, "Thread", "start", _start)
    if (pools := sys.modules.get("multiprocessing.pool")) is not None:
        for method in ("apply_async", "_map_async", "imap", "imap_unordered"):
            replace_method(pools, "ThreadPool", method, _submit)
    # Imported with its first mention, which a process that is about to end refuses; nobody makes
    # an executor there either.
    with suppress(RuntimeError):
        replace_method(futures, "ThreadPoolExecutor", "submit", _submit)


def _submit(submit: Callable[..., Any]) -> Callable[..., Any]:
    # Outside of a rollout too: the executor's thread may have been started inside one.
    def wrapped(self: Any, *call: Any, **kwargs: Any) -> Any:
        if call:
            try:
                call = (context.carried(call[0]), *call[1:])
            except Exception as error:  # OpenTelemetry half imported by another thread
                if is_of_signal_handler(error):
                    raise
        return submit(self, *call, **kwargs)

    return wrapped


def _start(start: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: threading.Thread) -> None:
        if context.current() is not None:
            try:
                _carry_into(self)
            except Exception as error:  # a thread of the agent's own class; it runs all the same
                if is_of_signal_handler(error):
                    raise
                _log.warning("a thread does not belong to its rollout", exc_info=True)
        start(self)

    return wrapped


def _carry_into(thread: Any) -> None:
    run = context.carried(thread.run, until_finished=True)

    def carried() -> None:
        with suppress(AttributeError):
            del thread.run  # its own again
        run()

    thread.run = carried

"""Exceptions that a signal handler of the agent's raises, as time-outs by `signal.alarm` do.

Python runs handlers in the main thread, between any two instructions, ours too. What we swallow so
that the agent is not disturbed (an error in encoding, in a span) must not be one of these: the
agent would wait for its time-out in vain. Many of them are OSErrors, since TimeoutError is one.
"""

from __future__ import annotations

import signal
import threading
from types import CodeType


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it, or something that it called.

    To be asked wherever an error is swallowed that may come up in the agent's own thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = _handlers()
    trace = error.__traceback__
    while handlers and trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> set[CodeType]:
    """The code of those that are set. The interpreter's own for Ctrl-C has none, and raises what is
    no `Exception`."""
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            code = getattr(handler, "__code__", None)  # of a method too
            code = code or getattr(type(handler).__call__, "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return found

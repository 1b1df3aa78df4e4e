"""What calls an agent that is a function on a host of a Ray cluster.

`ray_functions.py` starts it there, and is all that reads what it says.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tracegrad import exporter
from tracegrad.events import Event, Outcome
from tracegrad.runner.function_call import MAX_REASON, FunctionCall
from tracegrad.runner.outcomes import Classified
from tracegrad.runner.sent_rollout import SentRollout
from tracegrad.serializer import error_line


@dataclass(frozen=True, slots=True)
class HostedCallBegun:
    """The agent's time begins."""

    host: str


@dataclass(frozen=True, slots=True)
class HostedCallReturned:
    """The agent's time is over; what it has said is on its way."""


@dataclass(frozen=True, slots=True)
class HostedCallEnd:
    """`answer`: what the agent returned, pickled. The others: as of the `Rollout` there."""

    found: Classified
    answer: bytes | None = None
    may_have_calls: bool = False
    has_inner: bool = False


Said = HostedCallBegun | Event | HostedCallReturned | HostedCallEnd


def call_function(function: bytes, task: bytes, sent: SentRollout) -> Iterator[Said]:
    """A generator: what is said of the rollout arrives when it is said. `function`: a
    `FunctionCall`; it and the task are pickled."""
    said: queue.SimpleQueue[Said] = queue.SimpleQueue()
    # A daemon: nobody waits here for the threads of an agent that was ended.
    call = _HostedCall(function, task, sent, said)
    threading.Thread(target=call.run, name="tracegrad-agent", daemon=True).start()
    while True:
        some = said.get()
        yield some
        if isinstance(some, HostedCallEnd):
            return


class _HostedCall:
    def __init__(
        self, function: bytes, task: bytes, sent: SentRollout, said: queue.SimpleQueue[Said]
    ) -> None:
        self._function, self._task, self._sent, self._said = function, task, sent, said
        self._ended = False

    def run(self) -> None:
        try:
            end = self._end()
        except BaseException as error:  # ours: the agent's own are part of an end
            line = error_line(error, MAX_REASON)
            end = HostedCallEnd(Classified(Outcome.INFRA_ERROR, f"the call failed: {line}"))
        self._ended = True
        self._said.put(end)

    def _end(self) -> HostedCallEnd:
        with self._sent.entered(self._emit) as opened:
            try:
                function, task = _loaded_function(self._function), pickle.loads(self._task)
            except Exception as error:
                line = error_line(error, MAX_REASON)
                why = f"the agent cannot be loaded on {socket.gethostname()}: {line}"
                return HostedCallEnd(Classified(Outcome.ENV_ERROR, why))
            self._said.put(HostedCallBegun(socket.gethostname()))
            found, answer = _called(function, task, opened)
            self._said.put(HostedCallReturned())
        exporter.flush()  # spans, and rollouts inside of this one: a worker may be killed next
        return HostedCallEnd(found, answer, opened.may_have_calls, opened.has_inner)

    def _emit(self, event: Event) -> None:
        """What is said late has nobody here who reads it."""
        if self._ended:
            exporter.exporter(self._sent.url).put(event)
        else:
            self._said.put(event)


def _called(function: FunctionCall, task: Any, opened: Any) -> tuple[Classified, bytes | None]:
    try:
        answer = function.bound(task, opened)()
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
    except BaseException as error:  # also of sys.exit(): this process is not the agent's to end
        return function.failed(error), None
    try:
        return Classified(Outcome.COMPLETED), pickled(answer)
    except Exception as error:
        line = error_line(error, MAX_REASON)
        why = f"what the agent returned cannot be sent: {line}; return plain data"
        return Classified(Outcome.ENV_ERROR, why), None


async def _awaited(answer: Any) -> Any:
    return await answer


def pickled(value: object) -> bytes:
    """Also functions and classes of a script. Raises whatever their pickling raises."""
    from ray import cloudpickle

    found: bytes = cloudpickle.dumps(value)
    return found


@lru_cache(maxsize=1)
def _loaded_function(function: bytes) -> FunctionCall:
    """One for all calls of a process, as it is where it is not sent."""
    found: FunctionCall = pickle.loads(function)
    return found

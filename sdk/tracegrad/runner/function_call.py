"""A call of an agent that is a function: who makes it, and how it ended."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tracegrad.context import Rollout
from tracegrad.events import Outcome
from tracegrad.runner.call_thread import CallThread
from tracegrad.runner.outcomes import Classified
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad.serializer import error_line

# What clients raise when the serving side fails, by name: none of them is imported here.
_SERVING_ERRORS = frozenset(
    {"APIConnectionError", "InternalServerError", "ServiceUnavailableError", "ServerError",
     "ConnectError", "ReadError", "RemoteProtocolError", "ClientConnectionError"}
)  # fmt: skip
MAX_REASON = 2_000

Agent = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """What all calls of a run share.

    Attributes:
        agent: called with the task; with `rollout=...`, too, where it has a parameter of this name.
        timeout_s: of each call.
        infra_errors: exceptions that are not the agent's doing, beside those of clients whose
            server fails, and `SandboxUnavailable`. `BrokenEnvironment` is `env_error`.
    """

    agent: Agent
    timeout_s: float | None = None
    infra_errors: tuple[type[Exception], ...] = ()

    def bound(self, task: Any, opened: Rollout) -> Callable[[], Any]:
        if takes_rollout(self.agent):
            return partial(self.agent, task, rollout=opened)
        return partial(self.agent, task)

    def failed(self, error: BaseException) -> Classified:
        """`error`: what the agent raised."""
        if isinstance(error, BrokenEnvironment):
            return Classified(Outcome.ENV_ERROR, str(error)[:MAX_REASON])
        if isinstance(error, SandboxUnavailable):
            return Classified(Outcome.INFRA_ERROR, str(error)[:MAX_REASON])
        infra = isinstance(error, self.infra_errors) or is_serving_error(error)
        outcome = Outcome.INFRA_ERROR if infra else Outcome.AGENT_ERROR
        return Classified(outcome, error_line(error, MAX_REASON))

    def timed_out(self) -> Classified:
        return Classified(Outcome.BUDGET, f"timed out after {self.timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class FunctionEnd:
    """`answer`: what the agent returned, where it is completed."""

    found: Classified
    answer: Any = None


class FunctionCaller(Protocol):
    """Calls an agent, somewhere."""

    async def call(self, task: Any, opened: Rollout, begun: Callable[[], object]) -> FunctionEnd:
        """`begun` is called when its time begins. Raises no Exception. A cancellation ends what can
        be ended, and is raised."""
        ...


class ThreadCaller:
    """In this process; in a thread of its own, which cannot be ended, where it is no coroutine
    function. One that is out of time runs on in it, and keeps no other from its turn."""

    def __init__(self, function: FunctionCall) -> None:
        self._function = function

    async def call(self, task: Any, opened: Rollout, begun: Callable[[], object]) -> FunctionEnd:
        begun()
        try:
            async with asyncio.timeout(self._function.timeout_s) as bound:
                answer = await self._answer(task, opened)
            return FunctionEnd(Classified(Outcome.COMPLETED), answer)
        except Exception as error:
            if isinstance(error, TimeoutError) and bound.expired():
                return FunctionEnd(self._function.timed_out())
            return FunctionEnd(self._function.failed(error))

    async def _answer(self, task: Any, opened: Rollout) -> Any:
        call = self._function.bound(task, opened)
        if inspect.iscoroutinefunction(self._function.agent):
            return await call()
        with CallThread("tracegrad-agent") as thread:
            found = await thread.call(call)
        return await found if inspect.isawaitable(found) else found


def is_serving_error(error: BaseException) -> bool:
    """Whether a client says that its server, or the way to it, failed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or bool(names & _SERVING_ERRORS)


def takes_rollout(agent: Agent) -> bool:
    try:
        return "rollout" in inspect.signature(agent).parameters
    except (TypeError, ValueError):  # some that are written in C have none
        return False

"""One attempt of an agent that is a function of this process."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tracegrad.context import Rollout
from tracegrad.decorators import rollout
from tracegrad.events import Outcome
from tracegrad.runner.attempt import Attempt, AttemptObserver, calls_of
from tracegrad.runner.outcomes import NO_ANSWER, Classified
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad.runner.stage_limits import StageLimits
from tracegrad.serializer import error_line

# What clients raise when the serving side fails, by name: none of them is imported here.
_SERVING_ERRORS = frozenset(
    {"APIConnectionError", "InternalServerError", "ServiceUnavailableError", "ServerError",
     "ConnectError", "ReadError", "RemoteProtocolError", "ClientConnectionError"}
)  # fmt: skip
_MAX_REASON = 2_000

Agent = Callable[..., Any]
Reward = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSettings:
    """What all attempts of a run share.

    Attributes:
        agent: called with the task, in a thread where it is no coroutine function; with
            `rollout=...`, too, where it has a parameter of this name.
        name: the agent's, of its rollouts.
        reward: of the task and of what the agent returned; None: a number that it returns, or what
            it gave by `tracegrad.reward`.
        error_reward: of an agent that raised after an LLM call; None: unknown.
        timeout_s: of the agent. A function in a thread cannot be ended: it runs on, and its rollout
            is over.
        infra_errors: exceptions that are not the agent's doing, beside those of clients whose
            server fails, and `SandboxUnavailable`. `BrokenEnvironment` is `env_error`.
    """

    agent: Agent
    name: str
    limits: StageLimits
    threads: Executor
    reward: Reward | None = None
    error_reward: float | None = 0.0
    timeout_s: float | None = None
    infra_errors: tuple[type[Exception], ...] = ()
    tags: Mapping[str, object] = field(default_factory=dict)
    held_out: bool = False


async def run_function(
    task: Any, task_id: str, settings: FunctionSettings, observer: AttemptObserver
) -> Attempt:
    """A rollout of its own. A cancellation ends it as aborted, and is raised."""
    with rollout(
        task_id,
        tags=settings.tags,
        agent=settings.name,
        input=task,
        held_out=settings.held_out,
    ) as opened:
        observer.opened(opened.id)
        try:
            return await _FunctionAttempt(task, task_id, opened, settings, observer).run()
        except asyncio.CancelledError as error:
            opened.finish(Outcome.ABORTED, str(error) or "interrupted")
            raise


class _FunctionAttempt:
    def __init__(
        self,
        task: Any,
        task_id: str,
        opened: Rollout,
        settings: FunctionSettings,
        observer: AttemptObserver,
    ) -> None:
        self._task, self._task_id, self._opened = task, task_id, opened
        self._settings, self._observer = settings, observer
        self._seconds: dict[str, float] = {}

    async def run(self) -> Attempt:
        began = time.monotonic()
        async with self._settings.limits.agent():
            self._observer.agent_began()
            self._seconds["queue"] = -began + (began := time.monotonic())
            found, answer = await self._agent()
            self._seconds["agent"] = -began + (began := time.monotonic())
            self._observer.agent_ended()
        calls = await asyncio.to_thread(calls_of, self._opened)
        found = _classified(found, calls)
        if found.outcome.scored:
            found = await self._scored(found, answer)
        self._seconds["reward"] = time.monotonic() - began
        self._opened.finish(found.outcome, found.reason)
        outcome = self._opened.outcome or found.outcome  # the agent may have said it itself
        made = Attempt(
            rollout_id=self._opened.id,
            task_id=self._task_id,
            outcome=outcome,
            reason=found.reason,
            reward=self._opened.given_reward if outcome.scored else None,
            calls=calls,
            seconds=self._seconds,
        )
        self._observer.finished(made)
        return made

    async def _agent(self) -> tuple[Classified, Any]:
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout_s) as bound:
                return Classified(Outcome.COMPLETED), await self._called()
        except Exception as error:
            said = error_line(error, _MAX_REASON)
            if isinstance(error, TimeoutError) and bound.expired():
                return Classified(Outcome.BUDGET, f"timed out after {settings.timeout_s:g} s"), None
            if isinstance(error, BrokenEnvironment):
                return Classified(Outcome.ENV_ERROR, str(error)[:_MAX_REASON]), None
            if isinstance(error, SandboxUnavailable):
                return Classified(Outcome.INFRA_ERROR, str(error)[:_MAX_REASON]), None
            if isinstance(error, settings.infra_errors) or is_serving_error(error):
                return Classified(Outcome.INFRA_ERROR, said), None
            return Classified(Outcome.AGENT_ERROR, said), None

    async def _called(self) -> Any:
        agent = self._settings.agent
        call = partial(agent, self._task)
        if takes_rollout(agent):
            call = partial(call, rollout=self._opened)
        if inspect.iscoroutinefunction(agent):
            return await call()
        loop, here = asyncio.get_running_loop(), copy_context()
        found = await loop.run_in_executor(self._settings.threads, here.run, call)
        return await found if inspect.isawaitable(found) else found

    async def _scored(self, found: Classified, answer: Any) -> Classified:
        reward, value = self._settings.reward, None
        if found.outcome is not Outcome.COMPLETED:
            value = None if self._opened.rewarded else self._settings.error_reward
        elif reward is not None:
            try:
                value = reward(self._task, answer)
                value = await value if inspect.isawaitable(value) else value
            except Exception as error:
                said = f"reward: {error_line(error, _MAX_REASON)}"
                return Classified(Outcome.ENV_ERROR, said)
        elif isinstance(answer, int | float):
            value = answer
        if value is not None:
            self._opened.reward(value)
        return found


def _classified(found: Classified, calls: int | None) -> Classified:
    """As `outcomes.classify`."""
    if calls or found.outcome is Outcome.COMPLETED or not found.outcome.scored:
        return found
    if calls is None:
        return Classified(Outcome.INFRA_ERROR, f"{found.reason} ({NO_ANSWER})")
    timed_out = found.outcome is Outcome.BUDGET
    outcome = Outcome.INFRA_ERROR if timed_out else Outcome.ENV_ERROR
    return Classified(outcome, f"{found.reason} (before any LLM call)")


def is_serving_error(error: BaseException) -> bool:
    """Whether a client says that its server, or the way to it, failed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or bool(names & _SERVING_ERRORS)


def takes_rollout(agent: Agent) -> bool:
    try:
        return "rollout" in inspect.signature(agent).parameters
    except (TypeError, ValueError):  # some that are written in C have none
        return False

"""One attempt of an agent that is a function."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.context import Rollout
from tracegrad.decorators import rollout
from tracegrad.events import Outcome
from tracegrad.runner.attempt import Attempt, AttemptObserver, calls_of
from tracegrad.runner.function_call import MAX_REASON, FunctionCaller, FunctionEnd
from tracegrad.runner.outcomes import CallsMade, Classified, serving_failure
from tracegrad.runner.stage_limits import StageLimits
from tracegrad.serializer import error_line

Reward = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSettings:
    """What all attempts of a run share.

    Attributes:
        caller: of the agent.
        name: the agent's, of its rollouts.
        reward: of the task and of what the agent returned; None: a number that it returns, or what
            it gave by `tracegrad.reward`.
        error_reward: of an agent that raised after an LLM call; None: unknown.
    """

    caller: FunctionCaller
    name: str
    limits: StageLimits
    reward: Reward | None = None
    error_reward: float | None = 0.0
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
        end = await self._called()
        began = time.monotonic()
        calls = await asyncio.to_thread(calls_of, self._opened)
        found = _classified(end.found, calls)
        if found.outcome.scored:
            found = await self._scored(found, end.answer)
        self._seconds["reward"] = time.monotonic() - began
        self._opened.finish(found.outcome, found.reason)
        outcome = self._opened.outcome or found.outcome  # the agent may have said it itself
        made = Attempt(
            rollout_id=self._opened.id,
            task_id=self._task_id,
            outcome=outcome,
            reason=found.reason,
            reward=self._opened.given_reward if outcome.scored else None,
            calls=None if calls is None else calls.count,
            seconds=self._seconds,
        )
        self._observer.finished(made)
        return made

    async def _called(self) -> FunctionEnd:
        began = time.monotonic()

        def begun() -> None:
            nonlocal began
            self._seconds["queue"] = -began + (began := time.monotonic())

        async with self._settings.limits.agent():
            self._observer.agent_began()
            end = await self._settings.caller.call(self._task, self._opened, begun)
            self._seconds["agent"] = time.monotonic() - began
            self._observer.agent_ended()
        return end

    async def _scored(self, found: Classified, answer: Any) -> Classified:
        reward, value = self._settings.reward, None
        if found.outcome is not Outcome.COMPLETED:
            value = None if self._opened.rewarded else self._settings.error_reward
        elif reward is not None:
            try:
                value = reward(self._task, answer)
                value = await value if inspect.isawaitable(value) else value
            except Exception as error:
                said = f"reward: {error_line(error, MAX_REASON)}"
                return Classified(Outcome.ENV_ERROR, said)
        elif isinstance(answer, int | float):
            value = answer
        if value is not None:
            self._opened.reward(value)
        return found


def _classified(found: Classified, calls: CallsMade | None) -> Classified:
    """As `outcomes.classify`: not the policy's doing before any call, or without the proxy."""
    if found.outcome is Outcome.COMPLETED or not found.outcome.scored:
        return found
    if (why := serving_failure(calls)) is not None:
        return Classified(Outcome.INFRA_ERROR, f"{found.reason} ({why})")
    if calls is not None and calls.count:
        return found
    timed_out = found.outcome is Outcome.BUDGET
    outcome = Outcome.INFRA_ERROR if timed_out else Outcome.ENV_ERROR
    return Classified(outcome, f"{found.reason} (before any LLM call)")

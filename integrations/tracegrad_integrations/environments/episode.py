"""An episode of an environment as a rollout: a policy acts, the environment's reward is its reward.

Environments have Gymnasium 1.x's methods (`reset`, `step`, `close`), as GEM's have; nothing of
either is imported. `openenv_client.py` gives OpenEnv's the same methods.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, SupportsFloat

from tracegrad.context import Rollout
from tracegrad.events import Outcome, is_reward
from tracegrad.runner.call_thread import CallThread
from tracegrad.runner.function_call import is_serving_error
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxError, SandboxUnavailable
from tracegrad.serializer import error_line

log = logging.getLogger("tracegrad.environments")

_CLOSE_S = 10.0
_MAX_REASON = 2_000
# Observation, reward, terminated, truncated, info. A reward of None is unknown, which is not 0.
Step = tuple[Any, SupportsFloat | None, bool, bool, Mapping[str, Any]]


class InvalidAction(ValueError):
    """Raised by an environment's `step`: the policy's doing, not the environment's."""


class Environment(Protocol):
    """What is called of one. `close` and `action_space` may be missing: GEM's have neither."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, Mapping[str, Any]]: ...

    def step(self, action: Any) -> Step: ...


# Gets an observation and the environment's `info`; an action, or an awaitable of one.
Act = Callable[[Any, Mapping[str, Any]], Any]
# Makes what acts in one episode, with what it remembers of it.
Policy = Callable[[Rollout], Act]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """
    Attributes:
        steps: actions of an episode, beyond what the environment itself allows; then the agent has
            used up its budget. None: no bound.
        step_s: seconds of each `make`, `reset` and `step`; an environment that takes longer is
            broken. None: no bound.
    """

    steps: int | None = None
    step_s: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("steps", "step_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: {value} is not more than 0")


def episode_agent(
    make: Callable[[Any], Environment],
    policy: Policy,
    *,
    limits: EpisodeLimits = EpisodeLimits(),
    seed: Callable[[Any], int | None] = lambda task: seed_of(task),
) -> Callable[..., Awaitable[float | None]]:
    """An agent for `tracegrad.run`: each attempt at a task is an episode.

        agent = episode_agent(lambda task: gymnasium.make("FrozenLake-v1"), policy)
        tracegrad.run(agent, train=[{"id": "lake-7", "seed": 7}], attempts=8)

    The return, which is the sum of the environment's rewards, is the rollout's reward. `terminated`
    is `completed`, `truncated` is `budget`. What the environment raises is `env_error`, a
    connection to it that breaks `infra_error`; what the policy raises, and an action that is not in
    `action_space` or that the environment answers with `InvalidAction`, is `agent_error`.

    Args:
        make: an environment of its own for each attempt at the task; closed afterwards.
        policy: called with the attempt's rollout; what it returns is called with an observation and
            `info`, and returns the action; it may be a coroutine function.
        seed: of a task; without one its `seed`, as an attribute or a key: attempts of one task
            begin in one state.
    """

    async def play(task: Any, rollout: Rollout) -> float | None:
        with CallThread("tracegrad-environment") as thread:
            episode = _Episode(thread, rollout, limits)
            return await episode.run(partial(make, task), policy, seed(task))

    play.__name__ = str(getattr(policy, "__name__", "episode"))
    return play


def seed_of(task: Any) -> int | None:
    """Its `seed`. Raises ValueError."""
    found = task.get("seed") if isinstance(task, Mapping) else getattr(task, "seed", None)
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    raise ValueError(f"seed: {found!r:.60} is not an integer; give episode_agent seed=, a function")


class _Episode:
    """All calls of the environment, and of a policy that is no coroutine function, are made in one
    thread: SQLite and others want that."""

    def __init__(self, thread: CallThread, rollout: Rollout, limits: EpisodeLimits) -> None:
        self._thread, self._rollout, self._limits = thread, rollout, limits

    async def run(
        self, make: Callable[[], Environment], policy: Policy, seed: int | None
    ) -> float | None:
        """The return; None: no reward was given. Raises SandboxError and the policy's errors."""
        environment = await self._called("make", make)
        try:
            act = await self._thread.call(partial(policy, self._rollout))
            return await self._steps(environment, act, seed)
        finally:
            await self._close(environment)

    async def _steps(self, environment: Environment, act: Act, seed: int | None) -> float | None:
        reset = partial(environment.reset, seed=seed)
        observation, info = await self._called("reset", reset)
        total: float | None = None
        steps = 0
        while True:
            action = await self._action(act, observation, info)
            _check_action(environment, action)
            step = partial(environment.step, action)
            observation, reward, terminated, truncated, info = await self._called("step", step)
            steps += 1
            total = total if reward is None else self._added(total or 0.0, reward)
            if terminated:
                return total
            if truncated:
                return self._out_of_budget(total, f"truncated by the environment, step {steps}")
            if steps == self._limits.steps:
                return self._out_of_budget(total, f"not at an end after {steps} steps")

    async def _action(self, act: Act, observation: Any, info: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(act):
            return await act(observation, info)
        action = await self._thread.call(partial(act, observation, info))
        return await action if inspect.isawaitable(action) else action

    async def _called(self, what: str, call: Callable[[], Any]) -> Any:
        """Raises SandboxError."""
        try:
            async with asyncio.timeout(self._limits.step_s) as bound:
                return await self._thread.call(call)
        except InvalidAction:
            raise
        except SandboxError as error:
            raise self._failed(error) from error
        except Exception as error:
            if isinstance(error, TimeoutError) and bound.expired():
                said = f"environment: {what} took more than {self._limits.step_s:g} s"
                raise self._failed(BrokenEnvironment(said)) from None
            said = f"environment: {what}: {error_line(error, _MAX_REASON)}"
            kind = SandboxUnavailable if is_serving_error(error) else BrokenEnvironment
            raise self._failed(kind(said)) from error

    def _added(self, total: float, reward: SupportsFloat) -> float:
        try:
            total += float(reward)
        except (TypeError, ValueError):
            total = float("nan")
        if not is_reward(total):
            raise self._failed(BrokenEnvironment(f"environment: reward: {reward!r:.60}"))
        return total

    def _failed(self, error: SandboxError) -> SandboxError:
        broken = isinstance(error, BrokenEnvironment)
        outcome = Outcome.ENV_ERROR if broken else Outcome.INFRA_ERROR
        self._rollout.finish(outcome, str(error))
        return error

    def _out_of_budget(self, total: float | None, why: str) -> float | None:
        self._rollout.finish(Outcome.BUDGET, why)
        return total

    async def _close(self, environment: Environment) -> None:
        """The episode is over: what fails now is no outcome of it."""
        close = getattr(environment, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._thread.call(close)
        except Exception as error:
            log.warning("an environment of %s did not close: %r", self._rollout.id, error)


def _check_action(environment: Environment, action: Any) -> None:
    """Raises InvalidAction: the environment would stumble over it."""
    space = getattr(environment, "action_space", None)
    if space is not None and not space.contains(action):
        raise InvalidAction(f"action {action!r:.60} is not in {space!r:.200}")

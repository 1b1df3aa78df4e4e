"""An agent as a Gymnasium environment, for trainers that step environments.

The agent's LLM calls are the steps: an observation is the request that it sends, an action the
reply that it gets. `reset` starts it on a task; when it has ended, the reward of its rollout is the
reward of the last step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tracegrad.events import Outcome
from tracegrad.runner.attempt import Attempt, AttemptObserver
from tracegrad.runner.function_attempt import FunctionSettings, Reward, run_function
from tracegrad.runner.function_call import Agent, FunctionCall, ThreadCaller
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad.runner.stage_limits import StageLimits
from tracegrad.runner.training_run import task_id_of
from tracegrad_integrations.environments.action_upstream import (
    AgentCalls,
    PendingCall,
    assistant_message,
)
from tracegrad_integrations.environments.env_proxy import EnvProxy

try:
    import gymnasium
    from gymnasium.spaces import Space
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "gymnasium is not installed: pip install 'tracegrad[gymnasium]'", name="gymnasium"
    ) from None

Json = dict[str, Any]
# What says how a reply is sent, not what is asked.
_OF_TRANSPORT = ("stream", "stream_options")


class RequestSpace(Space[Json]):
    """Bodies of chat completions, as JSON objects with `messages`."""

    def contains(self, x: Any) -> bool:
        if not isinstance(x, Mapping) or not isinstance(x.get("messages"), list):
            return False
        try:
            json.dumps(x)
        except (TypeError, ValueError):
            return False
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> Json:
        return {"messages": [{"role": "user", "content": _text(self.np_random)}]}

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "RequestSpace()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestSpace)


class ReplySpace(Space[Any]):
    """Texts, or an assistant's messages with `content` and `tool_calls`."""

    def contains(self, x: Any) -> bool:
        try:
            assistant_message(x)
        except ValueError:
            return False
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return _text(self.np_random)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "ReplySpace()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplySpace)


class AgentEnv(gymnasium.Env[Json, Any]):
    """One episode at a time; any number of environments beside each other share an `EnvProxy`.

        with EnvProxy() as proxy:
            env = AgentEnv(solve, tasks, proxy)
            request, info = env.reset(seed=1)
            request, reward, terminated, truncated, info = env.step("the reply")

    An agent that uses up `timeout_s` is `truncated`. What is no doing of the policy is no reward:
    `step` and `reset` raise `BrokenEnvironment` (env_error) or `SandboxUnavailable` (infra_error).
    `info` has the `task_id`, and of the last step `outcome` and `reason`.

    Attributes:
        rollout_id: of the episode that began last, by which the store has it; empty: none has.
    """

    def __init__(
        self,
        agent: Agent,
        tasks: Sequence[Any],
        proxy: EnvProxy,
        *,
        reward: Reward | None = None,
        error_reward: float = 0.0,
        timeout_s: float | None = None,
        infra_errors: tuple[type[Exception], ...] = (),
        task_id: Callable[[Any], str] = task_id_of,
        tags: Mapping[str, object] | None = None,
        name: str | None = None,
    ) -> None:
        """
        Args:
            agent, reward, error_reward, infra_errors, task_id, tags, name: as of `tracegrad.run`.
            tasks: `reset` chooses one by its seed, or gets it: `options={"task": task}`.
            timeout_s: of an episode, with the time that passes before the actions.

        Raises ValueError: there are no tasks.
        """
        if not len(tasks):
            raise ValueError("tasks: there are none")
        self._tasks, self._proxy, self._task_id = tasks, proxy, task_id
        self._function = FunctionCall(agent=agent, timeout_s=timeout_s, infra_errors=infra_errors)
        self._reward, self._error_reward = reward, error_reward
        self._tags = dict(tags or {})
        self._name = name or str(getattr(agent, "__name__", type(agent).__name__))
        self.observation_space = RequestSpace()
        self.action_space = ReplySpace()
        self._episode: _AgentEpisode | None = None
        self.rollout_id = ""

    def reset(
        self, *, seed: int | None = None, options: Json | None = None
    ) -> tuple[Json, dict[str, Any]]:
        """The agent's first request. An episode that has not ended is aborted.

        Raises BrokenEnvironment: the agent ended without one; SandboxUnavailable.
        """
        super().reset(seed=seed)
        self.close()
        given = options or {}
        if "task" in given:
            task = given["task"]
        else:
            task = self._tasks[int(self.np_random.integers(len(self._tasks)))]
        self._episode = _AgentEpisode(task, self._task_id(task), self._settings(), self._proxy)
        coming = self._episode.calls.next()
        self.rollout_id = self._episode.rollout_id
        if isinstance(coming, Attempt):
            self._episode = None
            _check_end(coming)
            raise BrokenEnvironment("the agent ended without an LLM call")
        return self._episode.shown(coming), dict(self._episode.info)

    def step(self, action: Any) -> tuple[Json, float, bool, bool, dict[str, Any]]:
        """Raises ValueError: no reply, no episode, or no reward; and as `reset`."""
        message = assistant_message(action)
        episode = self._episode
        if episode is None or episode.waiting is None:
            raise ValueError("step: no request waits for a reply; call reset first")
        episode.waiting.answer(message)
        coming = episode.calls.next()
        if isinstance(coming, PendingCall):
            return episode.shown(coming), 0.0, False, False, dict(episode.info)
        self._episode = None
        reward = _check_end(coming)
        info = {**episode.info, "outcome": str(coming.outcome), "reason": coming.reason}
        truncated = coming.outcome is Outcome.BUDGET
        return {"messages": []}, reward, not truncated, truncated, info

    def close(self) -> None:
        """Aborts the episode, if there is one."""
        if self._episode is not None:
            self._episode.abort()
            self._episode = None

    def _settings(self) -> FunctionSettings:
        return FunctionSettings(
            caller=ThreadCaller(self._function),
            name=self._name,
            limits=StageLimits(1),
            reward=self._reward,
            error_reward=self._error_reward,
            tags=self._tags,
        )


class _AgentEpisode(AttemptObserver):
    """The attempt that runs. `waiting`: the call that was shown last."""

    def __init__(
        self, task: Any, task_id: str, settings: FunctionSettings, proxy: EnvProxy
    ) -> None:
        self.calls = AgentCalls()
        self.waiting: PendingCall | None = None
        self.rollout_id = ""
        self.info: dict[str, Any] = {"task_id": task_id}
        self._served = proxy.upstream.calls
        self._running: Future[Attempt] = proxy.start(run_function(task, task_id, settings, self))
        self._running.add_done_callback(self._over)

    def opened(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        if not self.calls.is_closed:
            self._served[rollout_id] = self.calls

    def shown(self, call: PendingCall) -> Json:
        self.waiting = call
        return {name: each for name, each in call.request.items() if name not in _OF_TRANSPORT}

    def abort(self) -> None:
        self.calls.close()
        self._running.cancel()

    def _over(self, running: Future[Attempt]) -> None:
        self._served.pop(self.rollout_id, None)
        if running.cancelled():
            self.calls.ended(RuntimeError("the episode was aborted"))
        elif (failure := running.exception()) is not None:
            self.calls.ended(failure)
        else:
            self.calls.ended(running.result())


def _check_end(attempt: Attempt) -> float:
    """The reward. Raises ValueError, BrokenEnvironment, SandboxUnavailable."""
    if attempt.outcome is Outcome.ENV_ERROR:
        raise BrokenEnvironment(attempt.reason or "env_error")
    if not attempt.outcome.scored:
        raise SandboxUnavailable(attempt.reason or str(attempt.outcome))
    if attempt.reward is None:
        raise ValueError(
            "the agent gave no reward: let it return a number, call tracegrad.reward(), or give"
            " AgentEnv reward=, a function"
        )
    return attempt.reward


def _text(rng: np.random.Generator) -> str:
    return "".join(rng.choice([*"abcdefgh "], size=8))

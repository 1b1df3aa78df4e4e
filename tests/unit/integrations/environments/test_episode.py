"""Episodes of Gymnasium's own environments, and of others with its methods, as rollouts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import openai
import pytest

import tracegrad
from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from tracegrad.store import RolloutSummary
from tracegrad_integrations.environments.episode import (
    Act,
    EpisodeLimits,
    episode_agent,
    seed_of,
)

DOWN, RIGHT = "1", "2"
LAKE = ["SFF", "FHF", "FFG"]


def make_lake(task: Any, **options: Any) -> Any:
    return gymnasium.make("FrozenLake-v1", desc=LAKE, is_slippery=False, **options)


def policy(rollout: tracegrad.Rollout) -> Act:
    """Says what the model says, as a number."""
    client = openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0)
    messages: list[Any] = []

    def act(observation: Any, info: Mapping[str, Any]) -> int:
        messages.append({"role": "user", "content": f"you are at {observation}"})
        answer = client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        return int(said)

    return act


def play(proxy: ProxyWithEngine, *replies: str, attempts: int = 1, **settings: Any) -> None:
    proxy.engine.replies.extend(Answer(reply) for reply in replies)
    agent = episode_agent(
        settings.pop("make", make_lake), settings.pop("policy", policy), **settings
    )
    options: Any = {"retries": 0, "concurrency": 1, "said": lambda _: None}
    tracegrad.run(agent, train=[{"id": "lake", "seed": 3}], attempts=attempts, **options)


def stored(proxy: ProxyWithEngine, count: int = 1) -> list[RolloutSummary]:
    def found() -> list[RolloutSummary] | None:
        rows = proxy.store.rollouts(limit=None)
        return rows if len(rows) == count and all(row.outcome for row in rows) else None

    rows: list[RolloutSummary] = eventually(found, 60)
    return rows


def test_attempts_of_a_task_are_episodes_and_the_return_is_the_reward(
    proxy: ProxyWithEngine,
) -> None:
    won, drowned = (DOWN, DOWN, RIGHT, RIGHT), (RIGHT, DOWN)
    play(proxy, *won, *drowned, attempts=2)
    rows = stored(proxy, 2)
    assert Counter((row.task_id, row.outcome, row.reward, row.turns) for row in rows) == {
        ("lake", "completed", 1.0, 4): 1,
        ("lake", "completed", 0.0, 2): 1,
    }
    assert {row.agent for row in rows} == {"policy"}


def test_what_the_environment_truncates_is_out_of_budget_and_scored(proxy: ProxyWithEngine) -> None:
    play(proxy, *[RIGHT] * 3, make=lambda task: make_lake(task, max_episode_steps=3))
    [row] = stored(proxy)
    assert (row.outcome, row.reward, row.turns) == ("budget", 0.0, 3)
    assert row.error == "truncated by the environment, step 3"


def test_so_is_what_has_no_end_within_the_limit(proxy: ProxyWithEngine) -> None:
    play(proxy, RIGHT, RIGHT, limits=EpisodeLimits(steps=2))
    [row] = stored(proxy)
    assert (row.outcome, row.error) == ("budget", "not at an end after 2 steps")


@pytest.mark.parametrize("reply", ["9", "north"])
def test_an_action_that_is_none_is_the_agents_doing(proxy: ProxyWithEngine, reply: str) -> None:
    """The environment would stumble over 9; the policy itself does over the other."""
    play(proxy, RIGHT, reply)
    [row] = stored(proxy)
    assert (row.outcome, row.reward) == ("agent_error", 0.0)


class Broken:
    """Of GEM's kind: no spaces, no `close`, texts for actions."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"guess, {seed}", {}

    def step(self, action: str) -> Any:
        return self._step()


def fail(error: Exception) -> Any:
    raise error


def hang() -> Any:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("step", "outcome", "said"),
    [
        (lambda: fail(KeyError("board")), "env_error", "environment: step: KeyError: 'board'"),
        (lambda: fail(SystemExit(3)), "env_error", "environment: step: RuntimeError: SystemExit"),
        (
            lambda: fail(ConnectionResetError("gone")),
            "infra_error",
            "environment: step: Connection",
        ),
        (lambda: ("", float("nan"), True, False, {}), "env_error", "environment: reward: nan"),
        (lambda: ("", "much", True, False, {}), "env_error", "environment: reward: 'much'"),
    ],
)
def test_failures_of_the_environment_are_told_apart_and_never_scored(
    proxy: ProxyWithEngine, step: Callable[[], Any], outcome: str, said: str
) -> None:
    play(proxy, RIGHT, make=lambda task: Broken(step))
    [row] = stored(proxy)
    assert (row.outcome, row.reward) == (outcome, None)
    assert (row.error or "").startswith(said)


def test_an_environment_that_hangs_is_broken(proxy: ProxyWithEngine) -> None:
    play(proxy, RIGHT, make=lambda task: Broken(hang), limits=EpisodeLimits(step_s=0.5))
    [row] = stored(proxy)
    assert (row.outcome, row.reward) == ("env_error", None)
    assert (row.error or "").endswith(" took more than 0.5 s")


async def test_beside_a_hung_environment_others_go_on(proxy: ProxyWithEngine) -> None:
    """Coroutines for policies; the rollout may be one's own, too."""
    opened = threading.Event()
    ended: list[str] = []

    class Waits(Broken):
        def step(self, action: str) -> Any:
            opened.wait(60)
            return "", 0.5, True, False, {}

        def close(self) -> None:
            ended.append("closed")

    async def act(observation: Any, info: Mapping[str, Any]) -> str:
        return f"{observation}!"

    def make(task: str) -> Any:
        return Waits(hang) if task == "slow" else Broken(lambda: ("", 1, True, False, {}))

    def seed(task: str) -> int:
        opened.set() if task == "quick" else None
        return 1

    agent = episode_agent(make, lambda rollout: act, seed=seed)
    report = await tracegrad.run_async(
        agent, train=["slow", "quick"], task_id=str, concurrency=2, said=lambda _: None
    )
    assert report.groups == 2
    rows = stored(proxy, 2)
    assert {row.task_id: row.reward for row in rows} == {"slow": 0.5, "quick": 1.0}
    assert ended == ["closed"]


@pytest.mark.parametrize("seed", ["3", True, 1.5])
def test_a_seed_that_is_none_is_named(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed: .* is not an integer"):
        seed_of({"seed": seed})
    assert seed_of("a text") is None


def test_limits_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="step_s: 0 is not more than 0"):
        EpisodeLimits(step_s=0)

"""Rewards less a running mean: what it is compared with, and what is remembered."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.advantage_samples import batches, scored, values
from tracegrad_trainer.losses import AdvantageMemory, RolloutRewards
from tracegrad_trainer.losses.advantages import running_mean


def of(*rewards: float, task: str = "t", agent: str = "a") -> list[RolloutRewards]:
    return [scored(reward, i, task=task, agent=agent) for i, reward in enumerate(rewards)]


def test_by_hand() -> None:
    memory: AdvantageMemory = {}
    # Nothing is known: 0, and the first rewards set the means.
    assert values("running", of(2.0), memory, running_decay=0.5) == [[0.0]]
    # Both against 2; then the mean is 1/4 x 2 + 3/4 x mean(4, 1).
    assert values("running", of(4.0, 1.0), memory, running_decay=0.5) == [[2.0], [-1.0]]
    assert memory["running"]["tasks"] == {"t": 2.375}
    assert values("running", of(1.0), memory, running_decay=0.5) == [[-1.375]]
    assert memory["running"] == {"tasks": {"t": 1.6875}, "agents": {"a": 1.6875}}


def test_a_new_task_is_compared_with_its_agents_mean() -> None:
    memory: AdvantageMemory = {}
    values("running", of(1.0), memory)
    assert values("running", of(4.0, task="new"), memory) == [[3.0]]
    assert values("running", of(4.0, task="other", agent="b"), memory) == [[0.0]]
    assert set(memory["running"]["tasks"]) == {"t", "new", "other"}


def test_a_task_is_known_to_all_agents() -> None:
    memory: AdvantageMemory = {}
    values("running", of(1.0), memory)
    assert values("running", of(4.0, agent="b"), memory) == [[3.0]]


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(batches(), max_size=4))
def test_memory_survives_being_written_as_json(parts: list[list[RolloutRewards]]) -> None:
    kept: AdvantageMemory = {}
    reloaded: AdvantageMemory = {}
    for part in parts:
        first = values("running", part, kept, running_decay=0.7)
        reloaded = json.loads(json.dumps(reloaded))
        assert values("running", part, reloaded, running_decay=0.7) == first
    assert kept == reloaded


@settings(max_examples=50, deadline=None)
@given(rewards=st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12))
def test_one_by_one_it_is_the_exponential_mean(rewards: list[float]) -> None:
    memory: AdvantageMemory = {}
    mean = rewards[0]
    for reward in rewards:
        [[value]] = values("running", of(reward), memory, running_decay=0.75)
        assert value == pytest.approx(reward - mean, abs=1e-9)
        mean = 0.75 * mean + 0.25 * reward


def test_the_memory_is_bounded_and_the_longest_unused_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_mean, "MAX_KEPT", 3)
    memory: AdvantageMemory = {}
    for task in ("a", "b", "c", "a", "d"):
        values("running", of(1.0, task=task), memory)
    assert list(memory["running"]["tasks"]) == ["c", "a", "d"]

"""The day's workload: what is drawn is what is to be expected in closed form."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from random import Random

import pytest
from bench.scale.workload import (
    DAY_S,
    HOUR_S,
    EngineRates,
    Length,
    Rollout,
    Workload,
    rollouts_of,
)

DAY = Workload(agents=300)


def fixed(tokens: int) -> Length:
    return Length(tokens, 1e-6, most=10 * tokens)


def drawn(workload: Workload, seed: int = 0) -> list[Rollout]:
    return [each for agent in range(workload.agents) for each in rollouts_of(workload, agent, seed)]


@pytest.mark.parametrize(
    "length", [DAY.task, DAY.observation, DAY.completion, Length(20, 1.5, most=60, least=10)]
)
def test_the_mean_of_a_length_is_that_of_its_draws(length: Length) -> None:
    chance = Random(3)
    drawn = [length.draw(chance) for _ in range(40_000)]
    assert min(drawn) >= length.least
    assert max(drawn) <= length.most
    assert statistics.fmean(drawn) == pytest.approx(length.mean, rel=0.02)


def test_a_length_without_bounds_has_the_log_normal_mean() -> None:
    assert Length(100, 0.5, most=10**9, least=1).mean == pytest.approx(100 * math.exp(0.125))
    assert fixed(100).mean == pytest.approx(100)
    assert Length(100, 0.5, most=2_000).times(3) == Length(300, 0.5, most=6_000)


def test_a_days_rollouts_are_those_of_all_agents_and_rise_to_the_peak() -> None:
    assert DAY.expected_rollouts(0, DAY_S) == pytest.approx(300 * 8)
    hours = [DAY.expected_rollouts(at, at + HOUR_S) for at in range(0, DAY_S, HOUR_S)]
    assert sum(hours) == pytest.approx(300 * 8)
    assert hours.index(max(hours)) in (14, 15), "around 15:00"
    assert DAY.peak_calls_s * HOUR_S == pytest.approx(max(hours) * DAY.mean_turns, rel=0.01)
    flat = replace(DAY, swing=0.0)
    assert flat.peak_calls_s == pytest.approx(flat.expected_calls / DAY_S)
    seconds = sum(DAY.rate(at + 0.5) for at in range(7 * HOUR_S, 8 * HOUR_S))
    assert hours[7] == pytest.approx(300 * seconds)


def test_turns_and_tokens_by_hand() -> None:
    """At most three turns, each followed by another with a chance of one half."""
    small = replace(
        DAY,
        turns=2.0,
        most_turns=3,
        instructions=100,
        task=fixed(10),
        observation=fixed(20),
        completion=fixed(30),
    )
    assert small.mean_turns == pytest.approx(1 + 0.5 + 0.25)
    assert small.mean_new_tokens == pytest.approx((110 + 0.75 * 20) / 1.75)
    # A second call's prompt has 50 tokens more than the first's, a third's 100.
    assert small.mean_prompt == pytest.approx(110 + (0.5 * 50 + 0.25 * 100) / 1.75)
    assert small.expected_calls == pytest.approx(300 * 8 * 1.75)


def test_draws_are_as_many_and_as_long_as_expected() -> None:
    found = drawn(DAY)
    assert len(found) == pytest.approx(2_400, abs=5 * math.sqrt(2_400))
    turns = [len(each.turns) for each in found]
    assert max(turns) <= DAY.most_turns
    assert statistics.fmean(turns) == pytest.approx(DAY.mean_turns, rel=0.08)
    said = [turn.said for each in found for turn in each.turns[1:]]
    assert statistics.fmean(said) == pytest.approx(DAY.observation.mean, rel=0.03)
    tools = [turn.tool_s for each in found for turn in each.turns]
    assert statistics.fmean(tools) == pytest.approx(DAY.tool_s, rel=0.03)
    for name, share in DAY.dialects:
        assert sum(each.dialect == name for each in found) / 2_400 == pytest.approx(share, abs=0.05)
    assert sum(each.named for each in found) / 2_400 == pytest.approx(0.8, abs=0.05)
    rewarded = [each for each in found if each.reward_after_s is not None]
    assert all(each.named for each in rewarded)
    assert len(rewarded) / 2_400 == pytest.approx(0.8 * 0.7, abs=0.05)
    at_peak = sum(12 <= each.begins / HOUR_S < 18 for each in found)
    expected = DAY.expected_rollouts(12 * HOUR_S, 18 * HOUR_S)
    assert at_peak == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_a_seed_decides_all_and_agents_differ() -> None:
    few = replace(DAY, agents=3)
    assert drawn(few) == drawn(few)
    assert drawn(few) != drawn(few, seed=1)
    first, second = (list(rollouts_of(few, agent, 0)) for agent in (0, 1))
    assert [each.begins for each in first] != [each.begins for each in second]
    assert [each.begins for each in first] == sorted(each.begins for each in first)


def test_an_engine_is_busy_for_its_share_of_a_sequence() -> None:
    engine = EngineRates("e", prefill=1_000, decode=50, sequences=10)
    assert engine.latency_s(500, 100) == pytest.approx(0.5 + 2.0)
    assert engine.busy_s(500, 100) == pytest.approx(0.5 + 0.2)

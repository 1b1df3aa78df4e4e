"""pass@k against the count of all draws, and what is in which figure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.inspect.pass_rates import PassRate, pass_rates, useful_ks
from tracegrad.pass_at_k import pass_at_k
from tracegrad.store.read.attempts import Attempt


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(
    ends: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(ends)))
    draws = [any(draw) for draw in itertools.combinations(ends, k)]
    assert pass_at_k(len(ends), sum(ends), k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("attempts", "k"), [(4, 5), (4, 0), (0, 1)])
def test_k_is_not_more_than_there_are(attempts: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k: {k} of {attempts} attempts"):
        pass_at_k(attempts, 0, k)


def attempt(reward: float | None, task: str | None = "t", **more: object) -> Attempt:
    given = {"rollout_id": f"r{id(more)}", "agent": None, "version": 1, "tag": None} | more
    return Attempt(task_id=task, reward=reward, completion_tokens=10, **given)  # type: ignore[arg-type]


def test_unknown_is_in_no_figure() -> None:
    [rate] = pass_rates(
        [attempt(1.0), attempt(0.0), attempt(0.0), attempt(0.5), attempt(None)],
        lambda each: each.version,
        success=0.5,
    ).values()
    assert (rate.attempts, rate.successes, rate.unknown) == (4, 2, 1)
    assert (rate.success, rate.reward) == (0.5, 0.375)
    assert rate.tokens_per_success == 20
    assert rate.at(1).value == 0.5
    assert rate.at(2).value == pytest.approx(1 - 1 / 6)


def test_tasks_count_alike_and_those_with_too_few_attempts_are_said() -> None:
    tried = [attempt(1.0, "easy")] * 4 + [attempt(0.0, "hard")] * 2
    [rate] = pass_rates(tried, lambda each: each.version, success=1.0).values()
    assert rate.success == pytest.approx(4 / 6)
    first, second, fourth = rate.at(1), rate.at(2), rate.at(4)
    assert (first.value, first.tasks) == (0.5, 2)
    assert (second.value, second.too_few) == (0.5, 0)
    assert (fourth.value, fourth.tasks, fourth.too_few) == (1.0, 1, 1)
    assert rate.at(8).value is None


def test_rollouts_without_a_task_are_tasks_of_their_own() -> None:
    tried = [attempt(1.0, None, rollout_id="a"), attempt(0.0, None, rollout_id="b")]
    [rate] = pass_rates(tried, lambda each: each.version, success=1.0).values()
    assert rate.at(1).tasks == 2
    assert rate.at(2).too_few == 2


def test_nothing_known_is_none() -> None:
    rate = PassRate()
    rate.add(attempt(None), 1.0)
    assert (rate.success, rate.reward, rate.tokens_per_success, rate.at(1).value) == (None,) * 4


def test_ks_are_those_that_some_task_has() -> None:
    rates = pass_rates([attempt(1.0)] * 5, lambda each: each.version, success=1.0).values()
    assert useful_ks(rates, None) == [1, 4]
    assert useful_ks(rates, [8, 2, 2]) == [2, 8]

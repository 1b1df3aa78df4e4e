"""What happens to rewards before there are advantages: a judge of groups, a penalty of length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer import own_parts
from support.trainer.advantage_samples import scored
from support.trainer.row_samples import Group, Sample
from tracegrad_trainer.losses import preset
from tracegrad_trainer.losses.advantages.compute import apply_overlong_penalty, overlong_penalty
from tracegrad_trainer.losses.judge import judge_rewards, load_judge

DAPO = {
    "overlong_budget": 20_480,
    "overlong_buffer": 4_096,
    "overlong_penalty": 1.0,
}


def group(*rewards: float) -> Group:
    return Group("g", [Sample(f"r{i}", reward) for i, reward in enumerate(rewards)])


@dataclass
class Says:
    answer: Any
    asked: list[Any] = field(default_factory=list)

    def __call__(self, compared: Any) -> Sequence[float]:
        self.asked.append(compared)
        answer: Sequence[float] = self.answer
        return answer


def test_a_judge_is_found_by_its_import_path_and_sees_the_whole_group() -> None:
    judge = load_judge(f"{own_parts.__name__}:ranks")
    assert judge_rewards(judge, group(0.5, 0.1, 7.0)) == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("ranks", "judge 'ranks': write package.module:function"),
        ("no_such_module_here:ranks", "cannot be imported: No module named"),
        (f"{own_parts.__name__}:nothing", "cannot be imported"),
        (f"{own_parts.__name__}:NOTHING", "is a int, not a function"),
    ],
)
def test_a_judge_that_is_not_there_is_one_clear_error(path: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as caught:
        load_judge(path)
    assert repr(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ([1.0], "group g: 1 rewards for 2 rollouts"),
        ([1.0, 2.0, 3.0], "group g: 3 rewards for 2 rollouts"),
        (
            [1.0, float("nan")],
            "group g: the reward of rollout r1 is nan; give a finite number from -1,000",
        ),
        (
            [float("inf"), 0.0],
            "group g: the reward of rollout r0 is inf; give a finite number from",
        ),
        ([1e308, 0.0], r"group g: the reward of rollout r0 is 1e\+308; give a finite number"),
        (None, "group g: not numbers"),
        (["good", "bad"], "group g: not numbers"),
    ],
)
def test_wrong_answers_of_a_judge_are_refused(answer: Any, wrong: str) -> None:
    judge = Says(answer)
    compared = group(0.0, 1.0)
    with pytest.raises(ValueError, match=wrong):
        judge_rewards(judge, compared)
    assert judge.asked == [compared]


def test_the_penalty_rises_over_the_last_part_of_the_budget() -> None:
    chosen = preset("grpo", **DAPO)
    lengths = [0, 16_384, 17_408, 18_432, 20_480, 90_000]
    assert [overlong_penalty(n, chosen) for n in lengths] == [0, 0, 0.25, 0.5, 1, 1]
    halved = preset("grpo", **DAPO | {"overlong_penalty": 0.5})
    assert [overlong_penalty(n, halved) for n in lengths] == [0, 0, 0.125, 0.25, 0.5, 0.5]


def test_without_a_budget_rewards_are_as_they_were_given() -> None:
    [same] = apply_overlong_penalty([scored(0.7, tokens=[10**6])], preset("grpo"))
    assert same.reward == 0.7


def test_all_sampled_tokens_of_a_rollout_count() -> None:
    chosen = preset("grpo", overlong_budget=10, overlong_buffer=4)
    found = apply_overlong_penalty([scored(1.0, tokens=[3, 4]), scored(1.0, tokens=[3, 3])], chosen)
    assert [rollout.reward for rollout in found] == [0.75, 1.0]


def reference(tokens: int, budget: int, part: int) -> float:
    """As the paper has it: what is added to the reward."""
    if tokens <= budget - part:
        return 0.0
    if tokens <= budget:
        return ((budget - part) - tokens) / part
    return -1.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 200), st.integers(0, 100), st.integers(1, 100))
def test_the_penalty_is_the_papers(tokens: int, free: int, part: int) -> None:
    budget = free + part
    chosen = preset("grpo", overlong_budget=budget, overlong_buffer=part)
    assert overlong_penalty(tokens, chosen) == pytest.approx(-reference(tokens, budget, part))

"""Advantages against plain loops, and what they promise of any batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.advantage_samples import batches, flat, scored, values
from tracegrad_trainer.losses import RolloutRewards

GAMMA, WEIGHT = 0.75, 0.5
SETTINGS = {
    "turn_return": {"gamma": GAMMA},
    "gigpo": {"gamma": GAMMA, "turn_weight": WEIGHT},
    "ipa": {"gamma": GAMMA, "centre": True},
}
Reference = Callable[[list[RolloutRewards], int], list[float]]


def near(a: list[list[float]], b: list[list[float]]) -> None:
    assert [len(x) for x in a] == [len(x) for x in b]
    np.testing.assert_allclose(flat(a), flat(b), rtol=1e-9, atol=1e-9)


def rewards_beside(all_: list[RolloutRewards], i: int) -> list[float]:
    return [r.reward for r in all_ if r.group == all_[i].group]


def spread(values: list[float]) -> float:
    return (statistics.stdev(values) if len(values) > 1 else 0.0) + 1e-6


def grpo(all_: list[RolloutRewards], i: int) -> list[float]:
    beside = rewards_beside(all_, i)
    return [(all_[i].reward - statistics.fmean(beside)) / spread(beside)] * len(all_[i].tokens)


def dr_grpo(all_: list[RolloutRewards], i: int) -> list[float]:
    return [all_[i].reward - statistics.fmean(rewards_beside(all_, i))] * len(all_[i].tokens)


def rloo(all_: list[RolloutRewards], i: int) -> list[float]:
    others = [r.reward for j, r in enumerate(all_) if j != i and r.group == all_[i].group]
    value = all_[i].reward - statistics.fmean(others) if others else 0.0
    return [value] * len(all_[i].tokens)


def opo(all_: list[RolloutRewards], i: int) -> list[float]:
    per_token = [
        r.reward for r in all_ if r.group == all_[i].group for _ in range(int(r.tokens.sum()))
    ]
    return [all_[i].reward - statistics.fmean(per_token or rewards_beside(all_, i))] * len(
        all_[i].tokens
    )


def returns(rollout: RolloutRewards, k: int, gamma: float = GAMMA) -> float:
    behind = rollout.turn_rewards[k:].tolist()
    last = gamma ** (len(behind) - 1) * rollout.reward
    return sum(gamma**n * reward for n, reward in enumerate(behind)) + last


def turn_return(all_: list[RolloutRewards], i: int) -> list[float]:
    found = []
    for k in range(len(all_[i].tokens)):
        standing = []
        for other in all_:
            if other.group != all_[i].group:
                continue
            last = len(other.tokens) - 1
            standing.append(returns(other, min(k, last)) if last >= 0 else other.reward)
        found.append(returns(all_[i], k) - statistics.fmean(standing))
    return found


def gigpo(all_: list[RolloutRewards], i: int) -> list[float]:
    def total(rollout: RolloutRewards) -> float:
        return rollout.reward + sum(rollout.turn_rewards.tolist())

    group = [r for r in all_ if r.group == all_[i].group]
    totals = [total(r) for r in group]
    whole = (total(all_[i]) - statistics.fmean(totals)) / spread(totals)
    found = []
    for k, state in enumerate(all_[i].states):
        equal = [returns(r, n) for r in group for n, s in enumerate(r.states) if s == state]
        if state is None:
            equal = [returns(all_[i], k)]
        turn = (returns(all_[i], k) - statistics.fmean(equal)) / spread(equal)
        found.append(whole + WEIGHT * turn)
    return found


def ipa(all_: list[RolloutRewards], i: int) -> list[float]:
    own = all_[i]
    centred = replace(
        own,
        reward=own.reward - statistics.fmean(rewards_beside(all_, i)),
        turn_rewards=np.zeros(len(own.tokens)),
    )
    return [returns(centred, k) for k in range(len(own.tokens))]


def max_rl(all_: list[RolloutRewards], i: int) -> list[float]:
    """As an estimator: the mean of the successes' scores less the mean of all, times n."""
    beside = rewards_beside(all_, i)
    successes = sum(beside)
    value = len(beside) * all_[i].reward / successes - 1 if successes else 0.0
    return [value] * len(all_[i].tokens)


REFERENCES: dict[str, Reference] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": dr_grpo,  # what is trained is whitened later
    "opo": opo,
    "turn_return": turn_return,
    "gigpo": gigpo,
    "ipa": ipa,
}


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=50, deadline=None)
@given(rollouts=batches())
def test_equals_a_plain_loop(name: str, rollouts: list[RolloutRewards]) -> None:
    expected = [REFERENCES[name](rollouts, i) for i in range(len(rollouts))]
    near(values(name, rollouts, **SETTINGS.get(name, {})), expected)


@settings(max_examples=50, deadline=None)
@given(rollouts=batches(smallest=0.0))
def test_max_rl_equals_a_plain_loop(rollouts: list[RolloutRewards]) -> None:
    near(values("max_rl", rollouts), [max_rl(rollouts, i) for i in range(len(rollouts))])


@pytest.mark.parametrize("name", [*REFERENCES, "max_rl", "running"])
@settings(max_examples=50, deadline=None)
@given(rollouts=batches(smallest=0.0), chance=st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(
    name: str, rollouts: list[RolloutRewards], chance
) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(rollouts)))
    chance.shuffle(order)
    # Two batches: what is remembered of the first must not depend on the order either.
    memory, other = {}, {}  # type: ignore[var-annotated]
    chosen = SETTINGS.get(name, {})
    values(name, rollouts, memory, **chosen)
    values(name, [rollouts[i] for i in order], other, **chosen)
    straight = values(name, rollouts, memory, **chosen)
    shuffled = values(name, [rollouts[i] for i in order], other, **chosen)
    near([straight[i] for i in order], shuffled)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "gigpo"])
@settings(max_examples=50, deadline=None)
@given(rollouts=batches(), shift=st.sampled_from([-8.0, 0.5, 100.0]))
def test_a_constant_added_to_a_group_changes_nothing(
    name: str, rollouts: list[RolloutRewards], shift: float
) -> None:
    # With a discount below 1 a constant of the outcome weighs more at the end: not promised.
    chosen = SETTINGS.get(name, {}) | ({"gamma": 1.0} if name == "turn_return" else {})
    moved = [replace(r, reward=r.reward + shift * (r.group == 1)) for r in rollouts]
    near(values(name, rollouts, **chosen), values(name, moved, **chosen))


@settings(max_examples=50, deadline=None)
@given(rollouts=batches(), shift=st.sampled_from([-8.0, 0.5, 100.0]))
def test_gigpo_without_a_discount_does_not_see_a_constant(
    rollouts: list[RolloutRewards], shift: float
) -> None:
    moved = [replace(r, reward=r.reward + shift) for r in rollouts]
    first, second = (values("gigpo", some, gamma=1.0) for some in (rollouts, moved))
    np.testing.assert_allclose(flat(first), flat(second), rtol=1e-6, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(rollouts=batches())
def test_turn_return_without_discount_and_turn_rewards_is_dr_grpo(
    rollouts: list[RolloutRewards],
) -> None:
    plain = [replace(r, turn_rewards=np.zeros(len(r.tokens))) for r in rollouts]
    near(values("turn_return", plain, gamma=1.0), values("dr_grpo", plain))


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
@settings(max_examples=50, deadline=None)
@given(rollouts=batches())
def test_a_groups_advantages_sum_to_nothing(name: str, rollouts: list[RolloutRewards]) -> None:
    with_turns = [replace(r, **_one_turn(r)) for r in rollouts]
    found = values(name, with_turns)
    for group in {r.group for r in rollouts}:
        one = [v[0] for v, r in zip(found, with_turns, strict=True) if r.group == group]
        assert math.fsum(one) == pytest.approx(0.0, abs=1e-9)


def _one_turn(rollout: RolloutRewards) -> dict[str, object]:
    one = scored(rollout.reward, rollout.group)
    return {k: getattr(one, k) for k in ("turn_rewards", "tokens", "parents", "states")}

"""Advantages of groups and turns: closed forms worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.advantage_samples import batches, flat, scored, values
from tracegrad_trainer.losses import RolloutRewards, compute_advantages, preset
from tracegrad_trainer.losses.advantages import ADVANTAGES, DemonstrationOutcome

ALL = [name for name in ADVANTAGES if name != "gae"]
OUTCOMES = ["grpo", "dr_grpo", "rloo", "reinforce++", "opo", "max_rl", "running"]


def test_the_registry_has_what_the_objectives_ask_for() -> None:
    assert {"grpo", "dr_grpo", "rloo", "reinforce++", "opo", "max_rl", "turn_return"} < {
        *ADVANTAGES
    }
    assert {"gigpo", "running", "ipa", "gae"} < {*ADVANTAGES}


@pytest.mark.parametrize("name", ["gae", *ALL])
def test_an_empty_batch_has_none(name: str) -> None:
    assert values(name, []) == []


@pytest.mark.parametrize("name", [name for name in ALL if name != "ipa"])
def test_a_rollout_alone_in_its_group_has_nothing_to_be_compared_with(name: str) -> None:
    # Two groups of one, of equal length: nothing is said about either.
    assert values(name, [scored(2.0, 0, turns=2), scored(2.0, 1, turns=2)]) == [[0, 0], [0, 0]]


@pytest.mark.parametrize("name", [name for name in ALL if name != "ipa"])
def test_equal_rewards_say_nothing(name: str) -> None:
    found = values(name, [scored(0.1, turns=2, tokens=[1, k + 1]) for k in range(3)])
    assert flat(found) == pytest.approx([0.0] * 6, abs=1e-9)


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes_are_the_same_for_all_turns_of_a_rollout(name: str) -> None:
    for turns in values(name, [scored(1.0, turns=3), scored(0.0, turns=2), scored(0.0, turns=0)]):
        assert len(set(turns)) <= 1


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    found = values("rloo", [scored(1.0), scored(0.0), scored(5.0), scored(3.0, 1)])
    assert found == [
        [pytest.approx(1 - 2.5)],
        [pytest.approx(0 - 3.0)],
        [pytest.approx(5 - 0.5)],
        [0.0],
    ]


def test_opo_weighs_rewards_by_length() -> None:
    # Baseline (3 x 1 + 1 x 0 + 4 x 2) / 8 = 11/8
    found = values(
        "opo", [scored(1.0, tokens=[2, 1]), scored(0.0, tokens=[1]), scored(2.0, tokens=[4])]
    )
    assert found == [[-3 / 8, -3 / 8], [-11 / 8], [5 / 8]]


def test_opo_without_a_token_has_the_plain_mean() -> None:
    assert values("opo", [scored(1.0, tokens=[0]), scored(0.0, tokens=[0])]) == [[0.5], [-0.5]]


def test_max_rl_divides_by_the_share_that_succeeded() -> None:
    # One of four: (1 - 1/4) / (1/4) = 3, the others -1. Nobody: 0.
    found = values("max_rl", [scored(r) for r in (1.0, 0.0, 0.0, 0.0)] + [scored(0.0, 1)] * 2)
    assert found == [[3.0], [-1.0], [-1.0], [-1.0], [0.0], [0.0]]


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"rewards of at least 0: rollout r9 has -0.5"):
        values("max_rl", [scored(1.0), scored(-0.5, rollout_id="r9")])


def test_turn_return_along_a_path() -> None:
    # gamma 1/2: G = (1 + 1/2 x (2 + 1/2 x 4)), (2 + 1/2 x 4), 4 of the first; of the second
    # 0, and at index 2 it stands with its last turn's 0.
    found = values(
        "turn_return",
        [scored(4.0, turn_rewards=[1, 2, 0]), scored(0.0, turns=2)],
        gamma=0.5,
    )
    assert found == [[1.5, 2.0, 2.0], [-1.5, -2.0]]


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1] * 4, [-1, 0, 0, 1]])
def test_time_is_the_rollouts_own_whatever_continues_what(parents: list[int]) -> None:
    # gamma 1/2, outcome 8: G3 = 8, G2 = 3 + 4 = 7, G1 = 1 + 3.5 = 4.5, G0 = 2.25. Alone in its
    # group the baseline is itself: beside a rollout of nothing it is half of it.
    found = values(
        "turn_return",
        [scored(8.0, turn_rewards=[0, 1, 3, 0], parents=parents), scored(0.0)],
        gamma=0.5,
    )
    assert found == [[1.125, 2.25, 3.5, 4.0], [-1.125]]


@pytest.mark.parametrize("name", ["turn_return", "gigpo", "ipa"])
@settings(max_examples=50, deadline=None)
@given(rollouts=batches(), data=st.data())
def test_what_continues_what_changes_no_advantage(
    name: str, rollouts: list[RolloutRewards], data: st.DataObject
) -> None:
    other = [
        replace(
            rollout,
            parents=np.array(
                [data.draw(st.integers(-1, k - 1)) for k in range(len(rollout.tokens))], np.int64
            ),
        )
        for rollout in rollouts
    ]
    assert values(name, rollouts, gamma=0.95) == values(name, other, gamma=0.95)


def test_five_turns_rendered_anew_are_discounted_as_five_chained_ones() -> None:
    expected = pytest.approx([0.95**4, 0.95**3, 0.95**2, 0.95, 1.0])
    for parents in ([-1] * 5, range(-1, 4)):
        [found] = values("ipa", [scored(1.0, parents=list(parents))], gamma=0.95)
        assert found == expected


def test_turn_return_counts_a_rollout_without_turns_by_its_reward() -> None:
    assert values("turn_return", [scored(1.0, turns=2), scored(0.0, turns=0)]) == [[0.5, 0.5], []]


def test_gigpo_adds_what_a_turn_is_worth_among_equal_states() -> None:
    # Rollouts: totals 3 and 0: sample deviation 3 / sqrt 2, so +-1 / sqrt 2. gamma 1/2.
    # State s: returns 1 + 1/2 x 2 = 2 and 0: again +-1 / sqrt 2; u and v are alone.
    a = 2**-0.5
    rollouts = [
        scored(2.0, turn_rewards=[1, 0], states=[b"s", b"u"]),
        scored(0.0, turns=2, states=[b"s", b"v"]),
        scored(7.0, 1, states=[b"s"]),
    ]
    found = values("gigpo", rollouts, gamma=0.5, turn_weight=2.0)
    expected = [[a + 2 * a, a], [-a - 2 * a, -a], [0.0]]
    assert flat(found) == pytest.approx(flat(expected), rel=1e-5)


def test_gigpo_compares_a_state_that_comes_twice_in_one_rollout() -> None:
    # gamma 1/2: returns 1 and 2 of the same state, in a group of one.
    found = values("gigpo", [scored(2.0, turns=2, states=[b"s", b"s"])], gamma=0.5)
    assert found == [[pytest.approx(-(2**-0.5), rel=1e-5), pytest.approx(2**-0.5, rel=1e-5)]]


def test_gigpo_compares_no_turns_whose_states_are_not_known() -> None:
    rollouts = [scored(2.0, states=[None, b"u"]), scored(0.0, states=[None, b"v"])]
    a = 2**-0.5
    assert flat(values("gigpo", rollouts)) == pytest.approx([a, a, -a, -a], rel=1e-5)


@pytest.mark.parametrize(
    ("centre", "expected"),
    [(False, [[0.25, 0.5, 1.0], [0.0, 0.0]]), (True, [[0.125, 0.25, 0.5], [-0.25, -0.5]])],
)
def test_ipa_discounts_by_the_distance_to_the_deciding_turn(
    centre: bool, expected: list[list[float]]
) -> None:
    rollouts = [scored(1.0, turn_rewards=[9, 9, 9]), scored(0.0, turns=2)]
    assert values("ipa", rollouts, gamma=0.5, centre=centre) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("marked", [0.5, 1.0, 0.5, 0.25]),
        ("rewarded", [0.25, 0.5, 1.0, 0.5]),
        ("last", [0.125, 0.25, 0.5, 1.0]),
    ],
)
def test_the_deciding_turn_is_the_one_that_is_chosen(chosen: str, expected: list[float]) -> None:
    rollout = scored(1.0, turn_rewards=[1, 0, 2, -3], deciding=1)
    assert values("ipa", [rollout], gamma=0.5, deciding_turn=chosen) == [expected]


def test_a_turn_whose_own_reward_is_0_decides_nothing() -> None:
    rollout = scored(1.0, turn_rewards=[1, 0])
    assert values("ipa", [rollout], gamma=0.5, deciding_turn="rewarded") == [[1.0, 0.5]]


@pytest.mark.parametrize("chosen", ["marked", "rewarded", "last"])
def test_where_no_turn_is_named_the_last_one_decides(chosen: str) -> None:
    rollout = scored(1.0, turn_rewards=[0, -1, 0])
    assert values("ipa", [rollout], gamma=0.5, deciding_turn=chosen) == [[0.25, 0.5, 1.0]]


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("centre", [False, True])
def test_an_experts_turn_has_the_experts_own_return(reward: float, centre: bool) -> None:
    shown = {0: DemonstrationOutcome(1.0, 4), 1: DemonstrationOutcome(2.0, 0)}
    rollouts = [scored(reward, turns=3, demonstrated=shown), scored(0.0)]
    imitating = preset("ipa", gamma=0.5, centre=centre)
    found, _ = compute_advantages(imitating, rollouts, {})
    assert found.tolist()[:2] == [0.0625, 2.0]
    found, _ = compute_advantages(imitating.model_copy(update={"imitation": 0.0}), rollouts, {})
    assert found.tolist()[:2] == [0.0, 0.0]


def test_gae_waits_for_values() -> None:
    assert values("gae", [scored(1.0, turns=2), scored(0.0)]) == [[0.0, 0.0], [0.0]]

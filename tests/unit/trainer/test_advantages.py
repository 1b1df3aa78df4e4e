"""Advantages of groups and turns: closed forms worked by hand."""

from __future__ import annotations

import pytest
from advantage_samples import flat, scored, values

from tracegrad_trainer.objectives.advantages import ADVANTAGES

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


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    # Centred: 1/2, -1/2; 1, -1. Weights 4, 2; 1, 1: sum 8, mean (2 - 1 + 1 - 1) / 8 = 1/8.
    found = values(
        "reinforce++",
        [
            scored(1.0, 0, tokens=[3, 1]),
            scored(0.0, 0, tokens=[2]),
            scored(4.0, 1, tokens=[1]),
            scored(2.0, 1, tokens=[1]),
        ],
    )
    # Squares: 4 (3/8)^2 + 2 (5/8)^2 + (7/8)^2 + (9/8)^2 = (36 + 50 + 49 + 81) / 64 = 27/8
    std = (27 / 8 / 7) ** 0.5
    assert flat(found) == pytest.approx(
        [3 / 8 / std, 3 / 8 / std, -5 / 8 / std, 7 / 8 / std, -9 / 8 / std], rel=1e-5
    )


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


def test_a_fork_is_worth_the_mean_of_its_branches() -> None:
    # 0 -> (1 -> 3, 2); gamma 1/2, outcome 8: G3 = 8, G1 = 1 + 4 = 5, G2 = 3 + 8 = 11,
    # G0 = 1/2 x (5 + 11) / 2 = 4. Alone in its group the baseline is itself: beside a rollout of
    # nothing it is half of it.
    found = values(
        "turn_return",
        [scored(8.0, turn_rewards=[0, 1, 3, 0], parents=[-1, 0, 0, 1]), scored(0.0)],
        gamma=0.5,
    )
    assert found == [[2.0, 2.5, 5.5, 4.0], [-2.0]]


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


@pytest.mark.parametrize(
    ("centre", "expected"),
    [(False, [[0.25, 0.5, 1.0], [0.0, 0.0]]), (True, [[0.125, 0.25, 0.5], [-0.25, -0.5]])],
)
def test_ipa_discounts_by_the_distance_to_the_deciding_turn(
    centre: bool, expected: list[list[float]]
) -> None:
    rollouts = [scored(1.0, turn_rewards=[9, 9, 9]), scored(0.0, turns=2)]
    assert values("ipa", rollouts, gamma=0.5, centre=centre) == expected


def test_ipa_at_a_fork_is_the_mean_over_the_paths() -> None:
    # 0 -> (1 -> 3, 2): (1/2^2 + 1/2) / 2
    [found] = values("ipa", [scored(1.0, parents=[-1, 0, 0, 1])], gamma=0.5)
    assert found == [0.375, 0.5, 1.0, 1.0]


def test_gae_waits_for_values() -> None:
    assert values("gae", [scored(1.0, turns=2), scored(0.0)]) == [[0.0, 0.0], [0.0]]

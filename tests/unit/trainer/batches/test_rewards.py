"""What rows say of rewards and of an expert's turns."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.row_samples import turn
from tracegrad.events import Turn
from tracegrad.turn_tree import TurnTree
from tracegrad_trainer.batches import BatchSettings, micro_batch, rows_of, turn_reason
from tracegrad_trainer.batches.select import rollout_rewards_of
from tracegrad_trainer.batches.version_scale import VersionScale


def three() -> list[Turn]:
    a = turn("a", [1, 2], [3, 4])
    b = turn("b", [5], [6, 7], parent=a)
    c = turn("c", [8], [9], parent=a)
    return [a, b, c]


def test_rewards_stand_where_they_were_earned() -> None:
    rollout = Rollout("r", 10.0, three(), turn_rewards={0: 0.5, 1: -0.25})
    first, second = rows_of(rollout, group_id="g", advantages=[1.0] * 3)
    assert first.reward.tolist() == [0, 0, 0, 0.5, 0, 0, -0.25]
    # The first turn belongs to the first row, and so does its reward; the rollout's to no row.
    assert second.reward.tolist() == [0] * 6
    batch = micro_batch([first, second], [0, 1])
    assert batch.reward.tolist() == [0, 0.5, 0, -0.25, 0]
    assert batch.score.tolist() == [10] * 5


def test_a_skipped_turns_reward_goes_to_what_led_to_it() -> None:
    rollout = Rollout("r", 0.0, three(), turn_rewards={0: 0.5, 1: -0.25, 2: 2.0})
    (row,) = rows_of(rollout, group_id="g", advantages=[1.0] * 3, skipped={"b", "c"})
    assert row.reward.tolist() == [0, 0, 0, 2.25]
    rows = rows_of(rollout, group_id="g", advantages=[1.0] * 3, skipped={"a"})
    assert [row.reward[row.keep].tolist() for row in rows] == [[0, -0.25], [2]]


def test_rewards_of_turns_that_came_later_are_not_read() -> None:
    rollout = Rollout("r", 0.0, three()[:1], turn_rewards={1: 3.0, 7: 1.0})
    (row,) = rows_of(rollout, group_id="g", advantages=[1.0])
    assert not row.reward.any()


def test_where_a_skipped_turns_reward_goes_does_not_hang_on_rows() -> None:
    """The same three turns, chained and each rendered by itself."""
    a = turn("a", [1, 2], [3, 4])
    b = turn("b", [5], [6, 7], parent=a)
    fresh = turn("b", [1, 2, 3, 4, 5], [6, 7])
    for second in (b, fresh):
        rollout = Rollout("r", 0.0, [a, second], turn_rewards={1: 2.0})
        (row,) = rows_of(rollout, group_id="g", advantages=[1.0] * 2, skipped={"b"})
        assert row.reward.tolist() == [0, 0, 0, 2]


def test_targets_know_the_place_of_their_turn_in_the_rollout() -> None:
    rollout = Rollout("r", 0.0, three())
    batch = micro_batch(rows_of(rollout, group_id="g", advantages=[1.0] * 3)[::-1], [0, 1])
    assert batch.turn_number.tolist() == [2, 0, 0, 1, 1]
    assert len(set(batch.rollout_keys.tolist())) == 1


def expert(**changes: object) -> Turn:
    nothing = {
        "completion_logprobs": array("f", [float("nan")] * 2),
        "policy_versions": ((3, 2),),
        "sampling": {"source": "demonstration", "temperature": 0.0},
    }
    return turn("x", [1, 2], [3, 4], **(nothing | changes))  # type: ignore[arg-type]


def test_an_experts_turn_is_trained_whatever_is_recorded_with_it() -> None:
    mine = turn("m", [5], [6], parent=expert(), version=7, sampling={"temperature": 0.5})
    chosen = selected(
        [Task("g", [Rollout("r", 1.0, [expert(), mine])])], version=7, max_staleness=0
    )
    assert chosen.trained == ["x", "m"]
    (row,) = chosen.rows
    assert row.demonstration.tolist() == [False, False, True, True, False, False]
    assert row.policy_version.tolist() == [-1, -1, -1, -1, -1, 7]
    assert row.rollout_logprobs.tolist() == pytest.approx([0, 0, 0, 0, 0, -0.1])
    assert row.temperature.tolist() == [1, 1, 1, 1, 1, 0.5]
    batch = micro_batch(chosen.rows, [0])
    assert batch.demonstration.tolist() == [True, True, False]
    assert np.isfinite(batch.rollout_logprobs).all()


def test_an_experts_tokens_are_not_sampled_ones() -> None:
    """No penalty of over-long rollouts, and no weight by length, is for what an expert wrote."""
    turns = [expert(), turn("m", [5], [6, 7, 8], parent=expert())]
    given = rollout_rewards_of(Rollout("r", 1.0, turns), TurnTree.of(turns), group=0, task="t")
    assert given.tokens.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"untrainable": "version_unknown"}, None),
        ({"untrainable": "greedy"}, None),
        ({"policy_versions": ((8, 2),)}, None),
        ({"untrainable": "redacted"}, "redacted"),
        ({"prompt_token_ids": array("i")}, "no_prompt"),
        ({"prompt_token_ids": array("i", range(20))}, "over_long"),
        ({"prompt_token_ids": array("i", [99])}, "foreign_token"),
    ],
)
def test_an_expert_is_held_to_its_tokens_only(changes: dict[str, object], reason: str) -> None:
    settings = BatchSettings(tokens_per_micro_batch=10, max_staleness=0)
    assert turn_reason(expert(**changes), settings, VersionScale(9), {8}, 50) == reason

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from functools import partial

import pytest

from support.trainer.row_samples import Group, Sample, turn
from tracegrad.events import Turn
from tracegrad_trainer.batches import BatchSettings, Row, rows_of, select
from tracegrad_trainer.losses import compute_advantages, preset


def chain() -> list[Turn]:
    a = turn("a", [1, 2], [3, 4], version=1)
    b = turn("b", [5], [6, 7, 8], parent=a, version=2)
    return [a, b]


def rows(turns: list[Turn], *, skipped: Collection[str] = (), advantage: float = 1.0) -> list[Row]:
    values = [advantage] * len(turns)
    return rows_of(Sample("r", 1.0, turns), group_id="g", advantages=values, skipped=skipped)


def test_a_conversation_is_one_row() -> None:
    (row,) = rows(chain(), advantage=0.5)
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True, True]
    assert row.turn_index.tolist() == [-1, -1, 0, 0, -1, 1, 1, 1]
    assert row.policy_version.tolist() == [-1, -1, 1, 1, -1, 2, 2, 2]
    assert row.rollout_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, -0.1, -0.2, -0.3])
    assert row.advantage.tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0.5, 0.5]
    assert (row.turn_ids, row.rollout_id, row.group_id) == (("a", "b"), "r", "g")


def test_a_fork_shares_its_ancestor_with_the_first_path_only() -> None:
    a = turn("a", [1], [2, 3])
    b = turn("b", [4], [5], parent=a)
    c = turn("c", [6], [7], parent=a)
    first, second = rows([a, b, c])
    assert first.turn_ids == ("a", "b")
    assert second.turn_ids == ("c",)
    assert second.input_ids.tolist() == [1, 2, 3, 6, 7]
    assert second.loss_mask.tolist() == [False, False, False, False, True]


def test_a_skipped_turn_is_context_and_stays_in_the_capture_mask() -> None:
    (row,) = rows(chain(), skipped={"a"})
    assert row.loss_mask.sum() == 5
    assert row.keep.tolist() == [False] * 5 + [True] * 3
    assert row.kept_turn_ids == ["b"]
    assert row.advantage.tolist() == [0] * 5 + [1] * 3


def test_a_row_ends_with_its_last_trained_turn() -> None:
    (row,) = rows(chain(), skipped={"b"})
    assert row.input_ids.tolist() == [1, 2, 3, 4]
    assert rows(chain(), skipped="ab") == []


def test_versions_change_within_a_turn_and_temperature_is_the_turns_own() -> None:
    one = turn("a", [1], [2, 3, 4], policy_versions=((4, 1), (5, 2)), sampling={"temperature": 0.5})
    (row,) = rows([one])
    assert row.policy_version.tolist() == [-1, 4, 5, 5]
    assert row.temperature.tolist() == [1, 0.5, 0.5, 0.5]


def test_selection_gives_every_turn_one_answer() -> None:
    def one(name: str, **changes: object) -> Turn:
        return turn(name, [1, 2, 3], [4, 5], **changes)  # type: ignore[arg-type]

    turns = [
        one("good", version=9),
        one("flagged", untrainable="sampling_truncated"),
        turn("empty", [1], []),
        turn("bare", [], [1]),
        one("greedy", sampling={"temperature": 0}),
        one("nearly", sampling={"temperature": 0.009}),
        one("infinite", completion_logprobs=array("f", [-1.0, -math.inf])),
        one("failed", version=8),
        one("stale", policy_versions=((5, 1), (9, 1))),
        turn("long", [1] * 9, [2, 3], version=9),
    ]
    group = Group("g", [Sample("r0", 1.0, turns), Sample("r1", 0.0, [one("other", version=9)])])
    equal = Group("h", [Sample("r2", 1.0, [one("e0", version=9)]), Sample("r3", 1.0, [])])
    selection = select(
        [group, equal],
        BatchSettings(tokens_per_micro_batch=10, max_staleness=3),
        advantages=partial(compute_advantages, preset("grpo", advantage="dr_grpo"), memory={}),
        current_version=9,
        failed_versions={8},
    )
    assert selection.trained == ["good", "other"]
    assert selection.skipped == {
        "flagged": "sampling_truncated",
        "empty": "no_tokens",
        "bare": "no_prompt",
        "greedy": "greedy",
        "nearly": "greedy",
        "infinite": "non_finite",
        "failed": "failed_push",
        "stale": "stale",
        "long": "over_long",
        "e0": "equal_reward",
    }
    assert selection.rollouts == ["r0", "r1", "r2", "r3"]
    assert [row.advantage[-1] for row in selection.rows] == [0.5, -0.5]
    assert selection.stats["groups_equal_reward"] == 1
    assert selection.stats["reward_mean"] == 0.75
    fewer = selection.without_rows([0], "non_finite")
    assert (fewer.trained, fewer.skipped["good"]) == (["other"], "non_finite")
    assert [row.rollout_id for row in fewer.rows] == ["r1"]


def test_a_reward_that_is_no_number_is_refused_by_name() -> None:
    group = Group("g", [Sample("r0", math.nan, chain()), Sample("r1", 0.0, [])])
    with pytest.raises(ValueError, match="reward of rollout r0 is nan"):
        select([group], BatchSettings(), advantages=lambda rollouts: [], current_version=1)


def test_rows_longer_than_the_budget_are_a_setting_error() -> None:
    with pytest.raises(ValueError, match="max_row_tokens"):
        BatchSettings(tokens_per_micro_batch=10, max_row_tokens=11)
    assert BatchSettings(tokens_per_micro_batch=10).row_limit == 10

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.row_samples import turn
from tracegrad.events import Outcome, Turn
from tracegrad_trainer.batches import BatchSettings, TrainingSelection, rows_of
from tracegrad_trainer.losses import AdvantageMemory, compute_advantages, preset


def one(name: str, **changes: object) -> Turn:
    return turn(name, [1, 2, 3], [4, 5], **changes)  # type: ignore[arg-type]


def centred() -> partial[list[np.ndarray]]:
    memory: AdvantageMemory = {}
    return partial(compute_advantages, preset("grpo", advantage="dr_grpo"), memory=memory)


def test_outcomes_that_are_left_out_still_count_in_the_baseline() -> None:
    task = Task(
        "g",
        [
            Rollout("r0", 1.0, [one("a")]),
            Rollout("r1", 0.0, [one("b")], outcome=Outcome.AGENT_ERROR),
            Rollout("r2", 0.0, [one("c")], outcome=Outcome.BUDGET),
        ],
    )
    chosen = selected([task], advantages=centred(), outcomes=["completed", "budget"])
    assert chosen.skipped == {"b": "agent_error"}
    assert [row.advantage[-1] for row in chosen.rows] == pytest.approx([2 / 3, -1 / 3])
    assert chosen.stats["skipped_agent_error"] == 1


@pytest.mark.parametrize("wrong", [[], ["infra_error"], ["done"]])
def test_only_scored_outcomes_can_be_asked_for(wrong: list[str]) -> None:
    with pytest.raises(ValidationError, match="outcomes"):
        BatchSettings.model_validate({"outcomes": wrong})


def test_repetitions_are_skipped_where_asked_and_stay_context() -> None:
    a = one("a")
    again = one("b")
    other = turn("c", [1, 2], [3, 4, 5])  # the same tokens, sampled from another point on
    later = turn("d", [6], [7], parent=again)
    task = Task(
        "g",
        [Rollout("r0", 1.0, [a, again, other, later]), Rollout("r1", 1.0, [one("e")])],
    )
    assert selected([task]).skipped == {}
    chosen = selected([task], drop_repeated=True)
    # Another rollout's same turn is a sample of its own.
    assert chosen.skipped == {"b": "repeated_turn"}
    assert chosen.stats["skipped_repeated_turn"] == 1
    assert [row.kept_turn_ids for row in chosen.rows] == [["a"], ["c"], ["d"], ["e"]]


def test_of_repetitions_the_first_that_may_be_trained_stays() -> None:
    greedy = one("a", sampling={"temperature": 0})
    task = Task("g", [Rollout("r0", 1.0, [greedy, one("b"), one("c")])])
    chosen = selected([task], drop_repeated=True)
    assert chosen.skipped == {"a": "greedy", "c": "repeated_turn"}


def test_replies_that_were_cut_off_are_skipped_where_asked() -> None:
    """They stay context of what follows, their tokens stay captured, and no baseline moves."""
    cut = one("a", finish_reason="length")
    later = turn("b", [6], [7], parent=cut, finish_reason="stop")
    lost = one("d", finish_reason="length")
    task = Task("g", [Rollout("r0", 1.0, [cut, later]), Rollout("r1", 0.0, [one("c"), lost])])
    assert selected([task], advantages=centred()).skipped == {}
    chosen = selected([task], advantages=centred(), drop_truncated=True)
    assert chosen.skipped == {"a": "truncated", "d": "truncated"}
    assert chosen.stats["skipped_truncated"] == 2
    first, second = chosen.rows
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False, True]
    assert first.keep.tolist() == [False] * 6 + [True]
    assert (first.advantage[-1], second.advantage[-1]) == (0.5, -0.5)
    alone = Task("g", [Rollout("r0", 1.0, [one("a")]), Rollout("r1", 0.0, [lost])])
    [row] = selected([alone], advantages=centred(), drop_truncated=True).rows
    assert row.advantage[-1] == 0.5, "a rollout without a trained turn counts in the baseline"


@pytest.mark.parametrize(
    ("limits", "is_cut"),
    [
        ({"max_tokens": 3}, True),
        ({"max_tokens": 4}, False),
        ({"max_completion_tokens": 3, "max_tokens": 9}, True),
        ({"max_completion_tokens": 9, "max_tokens": 3}, False),
        ({}, False),
    ],
)
def test_a_tool_call_as_long_as_its_limit_was_cut_off(limits: dict[str, int], is_cut: bool) -> None:
    """vLLM's word for it is "tool_calls", unless it streams."""
    found = turn("a", [1], [2, 3, 4], finish_reason="tool_calls", sampling=limits)
    ended = turn("b", [1], [2, 3, 4], finish_reason="stop", sampling=limits)
    task = Task("g", [Rollout("r0", 1.0, [found, ended])])
    chosen = selected([task], drop_truncated=True)
    assert chosen.skipped == ({"a": "truncated"} if is_cut else {})
    assert selected([task]).skipped == {}


def test_tokens_that_the_model_does_not_know_are_found_in_prompts_too() -> None:
    turns = [turn("a", [9], [1]), turn("b", [1], [9]), turn("c", [8], [8]), turn("d", [-1], [1])]
    task = Task("g", [Rollout("r0", 1.0, turns)])
    chosen = selected([task], vocabulary=9)
    assert chosen.skipped == dict.fromkeys("abd", "foreign_token")
    assert selected([Task("g", [Rollout("r0", 1.0, turns[:3])])]).skipped == {}


def long_path() -> list[Turn]:
    """a - b (fits), a - c - d (d does not)."""
    a = turn("a", [1], [2])
    b = turn("b", [3], [4], parent=a)
    c = turn("c", [5], [6], parent=a)
    d = turn("d", [7] * 8, [8], parent=c)
    return [a, b, c, d]


def test_over_long_paths_are_cut_or_dropped_whole() -> None:
    cut = selected([Task("g", [Rollout("r", 1.0, long_path())])], tokens_per_micro_batch=10)
    assert cut.skipped == {"d": "over_long"}
    dropped = selected(
        [Task("g", [Rollout("r", 1.0, long_path())])],
        tokens_per_micro_batch=10,
        over_long="drop",
    )
    # What is on a path that fits stays.
    assert dropped.skipped == {"c": "over_long", "d": "over_long"}
    assert dropped.trained == ["a", "b"]
    assert dropped.stats["skipped_over_long"] == 2
    fitting = selected(
        [Task("g", [Rollout("r", 1.0, long_path())])],
        tokens_per_micro_batch=13,
        over_long="drop",
    )
    assert fitting.skipped == {}


def test_stale_turns_count_less_and_too_stale_ones_nothing() -> None:
    turns = [
        one("new", version=9),
        turn("mixed", [1], [2, 3], policy_versions=((7, 1), (9, 1))),
        one("old", version=5),
        one("expert", sampling={"source": "demonstration"}),
    ]
    task = Task("g", [Rollout("r0", 1.0, turns), Rollout("r1", 0.0, [one("e", version=9)])])
    chosen = selected(
        [task], advantages=centred(), version=9, stale="weight", stale_decay=0.5, max_staleness=3
    )
    assert chosen.skipped == {"old": "stale"}
    tokens = len(turns[0].completion_token_ids)
    assert chosen.stats["stale_token_share"] == tokens / (3 * tokens + 2), "no demonstration's"
    # Each token by its own lag, trained or not; no demonstration's.
    assert {k: v for k, v in chosen.stats.items() if k.startswith("lag_share")} == {
        "lag_share_0": pytest.approx((2 * tokens + 1) / (3 * tokens + 2)),
        "lag_share_2": pytest.approx(1 / (3 * tokens + 2)),
        "lag_share_4": pytest.approx(tokens / (3 * tokens + 2)),
    }
    assert chosen.stats["sampled_tokens"] == 3 * tokens + 2
    by_turn = {row.kept_turn_ids[0]: row.advantage[row.keep].tolist() for row in chosen.rows}
    # The whole turn by its oldest token: a turn has one advantage.
    assert by_turn["new"] == [0.5, 0.5]
    assert by_turn["mixed"] == [0.125, 0.125]
    assert by_turn["expert"] == [0.5, 0.5]
    assert {name: chosen.advantages[name] for name in chosen.trained} == {
        name: values[0] for name, values in by_turn.items()
    }
    plain = selected([task], advantages=centred(), version=9, max_staleness=3)
    assert {abs(row.advantage[-1]) for row in plain.rows} == {0.5}


FILTER = """
def short(turn, rollout):
    return len(turn.completion_token_ids) < 3 or "wordy"

def not_from_the_start(turn, rollout):
    return turn is not rollout.turns[0]


def winners(turn, rollout):
    return rollout.reward > 0

def broken(turn, rollout):
    return 1 / 0

def silent(turn, rollout):
    return None

NUMBER = 3
"""


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_filters.py").write_text(FILTER)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_filters", None)
    return "my_filters"


def groups() -> list[Task]:
    turns = [one("a"), turn("b", [1], [2, 3, 4])]
    return [Task("g", [Rollout("r0", 1.0, turns), Rollout("r1", 0.0, [one("c")])])]


def test_a_predicate_says_yes_no_or_why_not(filters: str) -> None:
    assert selected(groups(), predicate=f"{filters}:short").skipped == {"b": "wordy"}
    assert selected(groups(), predicate=f"{filters}:winners").skipped == {"c": "predicate"}


def test_of_repetitions_one_stays_that_the_predicate_does_not_speak_against(filters: str) -> None:
    task = Task("g", [Rollout("r0", 1.0, [one("a"), one("b"), one("c")])])
    predicate = f"{filters}:not_from_the_start"
    chosen = selected([task], drop_repeated=True, predicate=predicate)
    assert chosen.skipped == {"a": "predicate", "c": "repeated_turn"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"predicate 'my_filters:broken' on turn a of rollout r0 raised ZeroDivision"),
        ("silent", r"predicate 'my_filters:silent' .* returned None: return True, False or"),
    ],
)
def test_an_error_in_a_predicate_names_it(filters: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selected(groups(), predicate=f"{filters}:{name}")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_filters", "write package.module:function"),
        ("my_filters:missing", "predicate 'my_filters:missing' cannot be imported"),
        ("no_such_module:f", "predicate 'no_such_module:f' cannot be imported"),
        ("my_filters:NUMBER", "is a int, not a function"),
    ],
)
def test_a_predicate_that_is_not_there_is_a_setting_error(
    filters: str, path: str, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        BatchSettings(predicate=path)


def test_the_selection_says_what_it_is_made_of() -> None:
    turns = [one("a"), turn("b", [6], [7, 8], parent=one("a")), one("c", untrainable="media")]
    tasks = [
        Task("g", [Rollout("r0", 1.0, turns), Rollout("r1", 0.0, [one("d")])]),
        Task("h", [Rollout("r2", 0.5, [one("e")]), Rollout("r3", 0.5, [one("f")])]),
    ]
    stats = selected(tasks, drop_equal_reward=True).stats
    assert stats == {
        "groups": 2,
        "groups_equal_reward": 1,
        "groups_trained": 1,
        "rollouts": 4,
        "reward_mean": 0.5,
        "reward_std": pytest.approx(0.125**0.5),
        "group_spread": 0.25,  # deviations of 0.5 and 0
        "advantage_abs_mean": 1,
        "turns": 6,
        "turns_skipped": 3,
        "skipped_equal_reward": 2,
        "skipped_media": 1,
        "sampled_tokens": 12,
        "lag_share_0": 1,
        "stale_token_share": 0,
        "states_given": 0,
        "states_observed": 0,
        "states_unknown": 6,
        "rows": 2,
        "rows_tree": 0,
        "row_tokens": 8 + 5,
        "row_tokens_longest": 8,
        "target_tokens": 6,
        "target_share": 6 / 13,
        "paths": 2,
        "forks": 0,
        "tokens_saved": 0,
        "trees_too_long": 0,
    }


def test_equal_rollouts_whose_turns_differ_are_trained_by_what_looks_at_turns() -> None:
    def task() -> Task:
        better = Rollout("r0", 0.1, [one("a")], turn_rewards={0: 1.0})
        return Task(
            "g",
            [better, Rollout("r1", 0.1, [one("b")]), Rollout("r2", 0.1, [one("c")])],
        )

    by_turn = partial(compute_advantages, preset("grpo", advantage="turn_return"), memory={})
    assert selected([task()], advantages=by_turn, drop_equal_reward=True).skipped == {}
    # These compare rollouts: all that is left of 0.1 three times is the rounding of its mean.
    chosen = selected([task()], advantages=centred(), drop_equal_reward=True)
    assert chosen.skipped == dict.fromkeys("abc", "equal_reward")


def test_a_rollout_by_itself_is_compared_with_nobody() -> None:
    alone = [Task(f"r{i}", [Rollout(f"r{i}", 1.0, [one(name)])]) for i, name in enumerate("ab")]
    running = partial(compute_advantages, preset("grpo", advantage="running"), memory={})
    chosen = selected(alone, advantages=running, drop_equal_reward=True, group_size=1)
    assert (chosen.trained, chosen.stats["groups_equal_reward"]) == (["a", "b"], 0)


def same(a: TrainingSelection, b: TrainingSelection) -> bool:
    return (
        [(row.rollout_id, row.advantage.tolist(), row.reward.tolist()) for row in a.rows]
        == [(row.rollout_id, row.advantage.tolist(), row.reward.tolist()) for row in b.rows]
        and (a.trained, a.skipped, a.rollouts) == (b.trained, b.skipped, b.rollouts)
        and list(a.stats.items()) == list(b.stats.items())
    )


def test_recorded_rewards_and_turn_counts_give_the_selection_again() -> None:
    def tasks(*, later: bool) -> list[Task]:
        """`later`: after the step another turn came, and rewards were revised."""
        turns = [one("a"), turn("b", [6], [7], parent=one("a"))]
        more = [turn("z", [8], [9], parent=turns[1])] if later else []
        first = Rollout("r0", 5.0 if later else 1.0, turns + more, turn_rewards={1: 0.5})
        return [Task("g", [first, Rollout("r1", 0.0, [one("c")], turn_rewards={0: 2.0 * later})])]

    settings = {"advantages": centred(), "shared_prefix": "tree", "drop_repeated": True}
    before = selected(tasks(later=False), **settings)  # type: ignore[arg-type]
    recorded = {"r0": (1.0, {1: 0.5}, 2), "r1": (0.0, {}, 1)}
    again = tasks(later=True)
    for rollout in again[0].rollouts:
        rollout.reward, rollout.turn_rewards, count = recorded[rollout.rollout_id]
        rollout.turns = rollout.turns[:count]
    assert same(before, selected(again, **settings))  # type: ignore[arg-type]
    assert not same(before, selected(tasks(later=True), **settings))  # type: ignore[arg-type]


def test_a_turn_reward_that_is_no_number_is_refused_by_name() -> None:
    task = Task("g", [Rollout("r0", 1.0, [one("a")], turn_rewards={0: float("inf")})])
    with pytest.raises(ValueError, match="reward of turn 0 of rollout r0 is inf"):
        selected([task])


def test_rows_that_leave_take_their_pairs_along() -> None:
    a, b = (rows_of(Rollout(n, 1.0, [one(n)]), group_id="g", advantages=[1.0])[0] for n in "ab")
    rows = [replace(row, pair=pair) for pair, row in [(0, a), (0, b), (1, b), (-1, a)]]
    chosen = TrainingSelection(
        rows=rows, trained=["a", "b"], skipped={}, rollouts=["a", "b"], stats={}
    )
    left = chosen.without_rows([1], "non_finite")
    # Both turns are still in rows of their own.
    assert [row.pair for row in left.rows] == [1, -1]
    assert (left.trained, left.skipped) == (["a", "b"], {})
    nothing = left.without_rows([0], "non_finite")
    assert (nothing.trained, nothing.skipped) == (["a"], {"b": "non_finite"})

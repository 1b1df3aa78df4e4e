"""Which traces `trainer sft` learns from: filters, errors, a user's say, and what is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.trainer.sft_samples import char_model, rollout, said, store_at, teach
from tracegrad.events import Outcome, Reward, RolloutStarted, Span, Turn
from tracegrad.store import ALL, RolloutFilter, Store
from tracegrad_trainer.batches import BatchSettings, Row, select, unit_advantages
from tracegrad_trainer.sft.dataset import ChosenExamples, choose_examples
from tracegrad_trainer.sft.tokenize import load_reply_tokenizer

TWO = [([5, 6], [8, 2]), ([1], [9, 2])]


def chosen(store: Store, which: RolloutFilter = ALL, **changes: Any) -> ChosenExamples:
    return choose_examples(store, which, **({"writer": None, "compared": False} | changes))


def why(found: ChosenExamples) -> dict[str, str | None]:
    """By turn id."""
    return {
        turn.turn_id: turn.untrainable
        for task in found.groups
        for example in task.rollouts
        for turn in example.turns
    }


def test_held_out_rollouts_are_no_examples_unless_they_are_asked_for(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        store.append(rollout("good", TWO, task="a"))
        opened, *others = rollout("eval", TWO, task="a")
        assert isinstance(opened, RolloutStarted)
        store.append([replace(opened, held_out=True), *others])
        found, asked = chosen(store), chosen(store, RolloutFilter(held_out=True))
    assert [r.rollout_id for task in found.groups for r in task.rollouts] == ["good"]
    assert found.reasons == Counter({"rollouts: held_out": 1})
    assert [r.rollout_id for task in asked.groups for r in task.rollouts] == ["eval"]


def test_the_stores_filter_chooses_and_the_rest_is_counted(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        store.append(rollout("good", TWO, task="a"))
        store.append(rollout("bad", TWO, task="a", reward=0.0))
        store.append(rollout("open", TWO, outcome=None))
        store.append(rollout("broken", TWO, outcome=Outcome.ENV_ERROR))
        store.append(rollout("empty", []))
        store.append(rollout("unscored", TWO, task=None, reward=None))
        everything = chosen(store)
        good = chosen(store, RolloutFilter(min_reward=1, task="a"))
        store.append(rollout("named", TWO, reward=None))
        store.append([Reward(rollout_id="named", value=1.0, name="score")])
        compared = chosen(store, compared=True)
    assert [[r.rollout_id for r in task.rollouts] for task in everything.groups] == [
        ["bad", "good"],
        ["unscored"],
    ]
    assert everything.found == 6
    assert everything.reasons == Counter(
        {"rollouts: open": 1, "rollouts: env_error": 1, "rollouts: no_turns": 1}
    )
    assert [r.rollout_id for task in good.groups for r in task.rollouts] == ["good"]
    assert compared.reasons["rollouts: no_reward"] == 1
    assert compared.reasons["rollouts: named_reward"] == 1, "as explain calls it"


def test_what_is_imitated_may_have_been_sampled_in_any_way(tmp_path: Path) -> None:
    ways = {0: {"untrainable": "greedy", "sampling": {"temperature": 0}}}
    with store_at(tmp_path) as store:
        store.append(rollout("a", TWO, changes=ways))
        store.append(rollout("b", TWO, changes={1: {"untrainable": "aborted"}}))
        found = chosen(store)
    assert why(found) == {"a.0": None, "a.1": None, "b.0": None, "b.1": "aborted"}
    rows = _rows(found)
    assert [row.keep.sum() for row in rows] == [4, 2]
    for row in rows:
        assert row.temperature.tolist() == [1.0] * len(row)
        assert row.demonstration.tolist() == row.loss_mask.tolist()
        assert set(row.policy_version.tolist()) == {-1}


def test_turns_that_went_wrong_are_context_where_that_is_asked(tmp_path: Path) -> None:
    three = [*TWO, ([1], [7, 2])]
    failed = Span(
        trace_id="1" * 32, span_id="2" * 16, rollout_id="tool", name="search",
        start_ns=1_001_500_000_000, end_ns=1_001_600_000_000, status="error",
    )  # fmt: skip
    with store_at(tmp_path) as store:
        store.append([*rollout("tool", three), failed])
        store.append(rollout("gave up", TWO, outcome=Outcome.AGENT_ERROR))
        store.append(rollout("cut", TWO, changes={0: {"finish_reason": "length"}}))
        plain, masked = chosen(store), chosen(store, mask_errors=True)
    assert set(why(plain).values()) == {None}
    assert {turn: reason for turn, reason in why(masked).items() if reason} == {
        "tool.1": "error_span",  # turns were captured at 1000, 1001, 1002
        "gave up.1": "agent_error",
        "cut.0": "cut_short",
    }
    row = next(row for row in _rows(masked) if row.rollout_id == "tool")
    assert row.input_ids[row.loss_mask & ~row.keep].tolist() == [9, 2]
    assert row.input_ids[row.keep].tolist() == [8, 2, 7, 2]


def only_long(turn: Turn, rollout: Any) -> bool | str:
    assert rollout.rollout_id == turn.rollout_id
    return len(turn.completion_token_ids) > 1 or "too_short"


def test_a_user_has_a_say_of_their_own(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        store.append(rollout("a", [([5], [8, 2]), ([1], [9])]))
        found = chosen(store, mask=f"{__name__}:only_long")
        with pytest.raises(ValueError, match="nowhere"):
            chosen(store, mask="nowhere:only_long")
    assert why(found) == {"a.0": None, "a.1": "too_short"}


def test_nothing_of_the_store_is_leased_or_marked(tmp_path: Path) -> None:
    def rows(store: Store) -> list[Any]:
        with store.reading() as connection:
            tables = ("rollouts", "turns", "turn_ledger", "leases", "steps")
            return [connection.execute(text(f"select * from {t}")).all() for t in tables]

    with store_at(tmp_path) as store:
        store.append(rollout("a", TWO))
        teach(store, {"messages": said("hi", "ho")})
        before = rows(store)
        chosen(store, writer=lambda: load_reply_tokenizer(char_model(tmp_path / "model")))
        assert rows(store) == before


def _rows(found: ChosenExamples) -> list[Row]:
    settings = BatchSettings(tokens_per_micro_batch=64, drop_equal_reward=False)
    return select(found.groups, settings, advantages=unit_advantages, current_version=0).rows

"""Texts dropped while tokens stay."""

from __future__ import annotations

from sqlalchemy import func, select

from support.store.conversations import bases, conversation
from support.store.events import make_span, rollout_events
from support.store.maintenance import drop, selection
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad.store.maintenance import (
    TextRemovalRule,
    drop_text,
    preview_drop_text,
    without_texts_of_event,
)
from tracegrad.store.models import Removals

ATTRIBUTES = {
    "gen_ai.request.model": "m",
    "gen_ai.usage.input_tokens": 12,
    "gen_ai.prompt.0.content": "what is the password",
    "output.value": ["it is", "hunter2"],
    "openinference.span.kind": "TOOL",
}


def test_texts_go_and_tokens_rewards_and_ledger_stay(store: Store) -> None:
    store.append([*conversation(), *rollout_events("r", turns=0)])
    before = store.rollout_turns("r", raw=False)
    Ledger(store).commit_step(
        StepRecord(step=1, version=1), trained=["r.0"], skipped={}, rollouts=["r"]
    )
    removed = drop(store)
    assert (removed["rollouts"], removed["turns"], removed["retold"]) == (1, 4, 0)
    assert removed["bytes"] > 0
    assert store.rollout_turns("r") == before
    detail = store.rollout("r")
    assert detail.summary.reward == 1.0
    assert detail.dispositions["r.0"].step == 1


def test_only_turns_from_before_lose_their_text_and_later_ones_stay_readable(
    store: Store,
) -> None:
    turns = conversation()
    for turn in turns:
        store.append([turn])
    assert bases(store) == {"r.0": None, "r.1": "r.0", "r.2": "r.1", "r.3": "r.2"}
    removed = drop(store, before=2500.0)
    assert (removed["turns"], removed["retold"]) == (2, 1)
    assert bases(store) == {"r.0": None, "r.1": None, "r.2": None, "r.3": "r.2"}
    kept = store.rollout_turns("r")
    assert [turn.request for turn in kept] == [None, None, turns[2].request, turns[3].request]
    assert [turn.response for turn in kept] == [None, None, turns[2].response, turns[3].response]
    assert [t.prompt_token_ids for t in kept] == [t.prompt_token_ids for t in turns]


def test_doing_it_again_changes_and_records_nothing(store: Store) -> None:
    store.append(conversation())
    rule = TextRemovalRule(selection=selection(), before=2500.0)
    assert preview_drop_text(store, rule)["turns"] == 2
    drop_text(store, rule)
    assert preview_drop_text(store, rule) == {"turns": 0, "bytes": 0}
    assert drop_text(store, rule) == {"rollouts": 0, "turns": 0, "spans": 0, "bytes": 0}
    with store.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(Removals)) == 1


def test_filters_choose_the_rollouts(store: Store) -> None:
    for name in ("a", "b"):
        store.append([*rollout_events(name, turns=0, task=name), *conversation(name)])
    drop(store, task="a")
    assert [turn.request is None for turn in store.rollout_turns("a")] == [True] * 4
    assert [turn.request is None for turn in store.rollout_turns("b")] == [False] * 4


def test_many_rollouts_go_in_several_transactions(store: Store) -> None:
    for number in range(7):
        store.append(conversation(f"r{number}", turns=2))
    assert drop_text(store, TextRemovalRule(selection=selection()), at_once=3)["rollouts"] == 7
    with store.reading() as connection:
        kinds = list(connection.scalars(select(Removals.kind)))
    assert kinds == ["text"] * 3


def test_spans_keep_numbers_and_names_and_lose_texts(store: Store) -> None:
    span = make_span(1, "r", start_ns=10**12, end_ns=10**12, attributes=ATTRIBUTES)
    store.append([span])
    assert drop(store, before=999.0)["spans"] == 0
    assert drop(store, before=1001.0)["spans"] == 1
    kept = {
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.prompt.0.content": "[dropped]",
        "output.value": "[dropped]",
        "openinference.span.kind": "TOOL",
    }
    assert store.spans("r")[0].attributes == kept
    assert without_texts_of_event(span).attributes == kept  # type: ignore[union-attr]
    assert drop(store)["spans"] == 0


def test_a_conversation_goes_on_under_a_writer_that_remembers_the_text(store: Store) -> None:
    turns = conversation(turns=3)
    store.append(turns[:2])
    drop(store)
    # In memory the writer still has the base of the second turn's request.
    store.append([turns[2]])
    assert store.rollout_turns("r")[2] == turns[2]
    assert bases(store)["r.2"] is None

"""Texts taken out of what is stored already, wherever a conversation repeats them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from support.store.conversations import bases, column, request, response
from support.store.events import make_span, make_turn, rollout_events
from support.store.maintenance import selection
from support.store.redactions import SECRET, WORDS, conversation, rule, without
from support.trainer.routing_files import experts_of
from tracegrad.cli.commands.redact import HookFailed, make_cleaner
from tracegrad.events import (
    Event,
    Json,
    Outcome,
    RolloutFinished,
    RolloutStarted,
    Turn,
)
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.capture.redaction import Hook, secrets
from tracegrad.store import Store
from tracegrad.store.maintenance import RedactionResult, RedactionRule, redact
from tracegrad.store.models import Outcomes, Removals, Spans, Turns

pytestmark = pytest.mark.databases("sqlite")  # of rows that were read


@pytest.mark.databases("sqlite", "postgres")
def test_every_turn_that_repeats_a_text_loses_it(store: Store) -> None:
    turns = conversation(store, "hello", f"my password: {SECRET}", "and now?", "bye")
    assert all(bases(store)[f"r.{n}"] for n in (1, 2, 3))
    found = redact(store, rule())
    assert store.rollout_turns("r") == [without(turn) for turn in turns]
    assert (found.removed["turns"], found.removed["rollouts"]) == (3, 1)
    # Still deltas to each other.
    assert [bases(store)[f"r.{n}"] for n in range(4)] == [None, "r.0", "r.1", "r.2"]


def test_a_text_in_a_reply_goes_from_the_requests_that_refer_to_it(store: Store) -> None:
    # The second request holds the reply where only its digest is stored.
    reply = f"{WORDS}{SECRET}"
    first = make_turn("a", request=request(WORDS), response=response(reply))
    second_request = request(WORDS, "x")
    second_request["messages"].insert(2, {"role": "assistant", "content": reply})
    second = make_turn("b", parent=first, request=second_request)
    store.append([first])
    store.append([second])
    redact(store, rule())
    assert store.rollout_turns("r") == [without(first), without(second)]


def test_turns_that_do_not_change_are_encoded_again_where_they_must(store: Store) -> None:
    reply = f"{WORDS}{SECRET}"
    first = make_turn("a", request=request(WORDS), response=response(reply))
    second = make_turn("b", parent=first, request=request(WORDS, "x"))
    store.append([first])
    store.append([second])
    found = redact(store, rule())
    assert (found.removed["turns"], found.removed["retold"]) == (1, 1)
    assert store.rollout_turns("r") == [without(first), second]


@pytest.mark.databases("sqlite", "postgres")
def test_doing_it_again_changes_and_records_nothing(store: Store) -> None:
    conversation(store, SECRET, "x")
    redact(store, rule())
    with store.reading() as connection:
        before = connection.execute(select(*Turns.__table__.columns)).all()
    found = redact(store, rule())
    assert not any(found.removed.values())
    with store.reading() as connection:
        assert connection.execute(select(*Turns.__table__.columns)).all() == before
        assert connection.scalar(select(func.count()).select_from(Removals)) == 1


@pytest.mark.databases("sqlite", "postgres")
def test_the_record_of_it_does_not_say_what_it_was(store: Store) -> None:
    conversation(store, SECRET)
    redact(store, rule(selection=selection(outcome="open")))
    with store.reading() as connection:
        [row] = connection.execute(select(Removals.kind, Removals.rule, Removals.removed)).all()
    assert row.kind == "redaction"
    assert row.rule["redact"] == "a literal text"
    assert row.rule["outcome"] == "open"
    assert row.removed["turns"] == 1
    assert SECRET not in dump_json([row.rule, row.removed])


def test_a_dry_run_counts_the_same_and_changes_nothing(store: Store) -> None:
    turns = conversation(store, SECRET, "x")
    loose = make_span(1, name=SECRET)
    store.append([loose])
    counted = redact(store, rule(), dry_run=True)
    assert store.rollout_turns("r") == turns
    assert loose.name in everything(store)
    assert counted == redact(store, rule())


def everywhere(rollout_id: str = "r") -> list[Event]:
    ends = ((Outcome.AGENT_ERROR, f"E: {SECRET}", 2.0), (Outcome.ABORTED, f"F: {SECRET}", 3.0))
    return [
        RolloutStarted(
            rollout_id=rollout_id, task={"q": SECRET}, tags={"k": SECRET, "split": "train"}
        ),
        make_turn(
            "t",
            rollout_id,
            request={"prompt": f"{SECRET}?"},
            response={"choices": [SECRET]},
            sampling={"temperature": 1.0, "stop": [SECRET]},
        ),
        make_span(1, rollout_id, name=f"a {SECRET}", attributes={"x": [SECRET]}),
        make_span(2, name="loose", attributes={"y": SECRET}),
        *(RolloutFinished(rollout_id=rollout_id, outcome=outcome, error=error, finished_at=at)
          for outcome, error, at in ends),
    ]  # fmt: skip


def everything(store: Store) -> str:
    """All texts that anybody can read."""
    detail = store.rollout("r")
    with store.reading() as connection:
        spans = connection.execute(select(Spans.name, Spans.attributes)).all()
        ends = connection.execute(select(Outcomes.error)).all()
    texts = [
        (detail.task, detail.summary.tags, detail.summary.error),
        [(turn.request, turn.response, turn.sampling) for turn in detail.turns],
        [tuple(row) for row in (*spans, *ends)],
    ]
    return dump_json(texts)


@pytest.mark.databases("sqlite", "postgres")
def test_a_text_goes_wherever_it_stands(store: Store) -> None:
    store.append(everywhere())
    found = redact(store, rule())
    assert SECRET not in everything(store)
    counts = {"rollouts": 1, "turns": 1, "spans": 2, "tasks": 1, "errors": 2}
    assert {name: found.removed[name] for name in counts} == counts
    row = store.rollouts()[0]
    assert row.tags == {"k": "[redacted]", "split": "train"}
    assert row.error == "E: [redacted]"
    turn = store.rollout_turns("r")[0]
    assert turn.sampling == {"temperature": 1.0, "stop": ["[redacted]"]}
    assert list(turn.completion_token_ids) == [4, 5]


@pytest.mark.databases("sqlite", "postgres")
@pytest.mark.parametrize("field", ["request", "response", "span", "task", "error"])
def test_only_the_chosen_fields_lose_it(store: Store, field: str) -> None:
    store.append(everywhere())
    before = everything(store).count(SECRET)
    in_field = {"request": 2, "response": 1, "span": 3, "task": 2, "error": 3}
    redact(store, rule(fields=frozenset([field])))
    assert everything(store).count(SECRET) == before - in_field[field]


def test_other_rollouts_than_the_selected_stay_as_they_are(store: Store) -> None:
    for name in ("a", "b"):
        store.append(rollout_events(name, task=name, turns=0))
        conversation(store, SECRET, rollout_id=name)
    store.append([make_span(1, name=SECRET)])
    redact(store, rule(selection=selection("a")))
    assert SECRET not in dump_json(store.rollout_turns("a")[0].request)
    assert SECRET in dump_json(store.rollout_turns("b")[0].request)
    with store.reading() as connection:
        assert connection.scalar(select(Spans.name)) == SECRET, "a span of no rollout"


def test_a_tag_is_cleaned_where_the_task_is_clean(store: Store) -> None:
    store.append([RolloutStarted(rollout_id="r", task={"q": "x"}, tags={"k": SECRET})])
    assert redact(store, rule()).removed["tasks"] == 1
    assert store.rollouts()[0].tags == {"k": "[redacted]"}


def test_secrets_of_known_forms_are_found_as_at_capture(store: Store) -> None:
    key = "ghp_" + "a1B2" * 9
    conversation(store, f"use {key}", "then")
    clean = make_cleaner([Hook("secrets", secrets)])
    redact(store, RedactionRule(selection=selection(), clean=clean, name="secrets"))
    assert key not in dump_json([turn.request for turn in store.rollout_turns("r")])


def test_a_hook_that_fails_stops_it_and_destroys_nothing(store: Store) -> None:
    turns = conversation(store, SECRET, "x")

    def fails(record: Json) -> Json:
        raise RuntimeError(SECRET)

    clean = make_cleaner([Hook("m:f", fails)])
    failing = RedactionRule(selection=selection(), clean=clean, name="m:f")
    with pytest.raises(HookFailed, match=r"m:f failed on a turn \(RuntimeError\)") as raised:
        redact(store, failing)
    assert SECRET not in str(raised.value)
    assert store.rollout_turns("r") == turns


@pytest.mark.databases("sqlite", "postgres")
def test_tokens_go_only_when_asked_with_all_that_continues_them(store: Store) -> None:
    turns = conversation(store, "hello", SECRET)
    fork = make_turn("fork", parent=turns[0], request=request("hi"), new=[9])
    # What continues the secret need not repeat its text.
    told = {"state_key": "s", "observation": "0" * 32, "routed_experts": experts_of(14)}
    child = make_turn("child", parent=turns[1], request={"previous": "r.1"}, **told)
    store.append([fork])
    store.append([child])
    found = redact(store, rule(drop_tokens=True))
    assert (found.removed["turns"], found.removed["tokens_dropped"]) == (1, 2)
    kept = {turn.turn_id: turn for turn in store.rollout_turns("r")}
    assert kept["r.0"] == turns[0]
    assert kept["fork"] == fork
    for turn_id in ("r.1", "child"):
        turn = kept[turn_id]
        assert turn.untrainable == "redacted"
        # What is left is what the turn above, which stays as it is, has of it.
        assert turn.prompt_token_ids == turns[0].prompt_token_ids + turns[0].completion_token_ids
        sampled = [turn.completion_token_ids, turn.completion_logprobs, turn.policy_versions]
        assert not any(sampled)
        assert not any(getattr(turn, name) for name in told)
        assert column(store, "last_version")[turn_id] is None
    assert kept["child"].parent_id == "r.1"
    assert kept["child"].request == child.request


def test_a_rollout_that_begins_with_the_text_keeps_no_tokens_at_all(store: Store) -> None:
    conversation(store, SECRET, "x", "y")
    redact(store, rule(drop_tokens=True))
    turns = store.rollout_turns("r")
    assert [len(turn.prompt_token_ids) for turn in turns] == [0, 0, 0]
    assert store.rollout("r").summary.completion_tokens == 0


def test_a_conversation_goes_on_under_a_writer_that_remembers_what_was_redacted(
    store: Store,
) -> None:
    turns = conversation(store, SECRET, "x")
    redact(store, rule(drop_tokens=True))
    follows = make_turn("next", parent=turns[1], request=request(WORDS + SECRET, WORDS + "x", "y"))
    store.append([follows])
    stored = store.rollout_turns("r")[-1]
    assert stored == follows  # what comes from now on is the proxy's to clean
    assert stored.parent_id == "r.1"


def test_a_rollout_that_cannot_be_read_is_reported_and_the_others_are_done(store: Store) -> None:
    for name in ("a", "b"):
        conversation(store, SECRET, rollout_id=name)
    with store.exclusive() as connection:
        connection.exec_driver_sql("UPDATE turns SET request = NULL WHERE turn_id = 'a.0'")
    found: RedactionResult = redact(store, rule())
    assert found.removed["rollouts"] == 1
    assert list(found.unreadable) == ["a"]
    assert "turn a.0" in found.unreadable["a"]


def test_requests_of_the_first_revision_are_redacted_too(store: Store) -> None:
    turn = make_turn("old", request=request(SECRET))
    store.append([turn])
    with store.exclusive() as connection:
        connection.exec_driver_sql("UPDATE turns SET request_marks = NULL")
    assert redact(store, rule()).removed["turns"] == 1
    follows = make_turn("new", parent=turn, request=request(WORDS, "x"))
    store.append([follows])
    assert store.rollout_turns("r") == [without(turn), follows]


TEXTS = st.lists(st.sampled_from(["", "s", WORDS, f"{WORDS}s", f"s{WORDS}", "a" * 300]), max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(TEXTS, min_size=1, max_size=5), drop=st.integers(0, 5))
def test_whatever_changes_every_request_reads_as_it_would_have_been_stored(
    store: Store, requests: list[list[str]], drop: int
) -> None:
    name = f"r{len(store.rollouts(limit=None))}"
    turns = [
        make_turn(f"{name}.{n}", name, request=request(*texts), response=response("".join(texts)))
        for n, texts in enumerate(requests)
    ]
    for turn in turns:
        store.append([turn])

    def clean(event: Event) -> Event:
        assert isinstance(event, Turn)
        if event.turn_id == f"{name}.{drop}":
            return replace(event, request=None)
        return without(event, "s")

    fields = frozenset(["request", "response"])
    wanted = RedactionRule(selection=selection(name), clean=clean, name="x", fields=fields)
    assert not redact(store, wanted).unreadable
    assert store.rollout_turns(name) == [clean(turn) for turn in turns]

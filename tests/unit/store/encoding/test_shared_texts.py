"""Long texts that several rollouts have are stored once, and go when nobody has them any more."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from support.store.corruption import corrupt
from support.store.doctor_findings import found
from support.store.english_text import prose
from support.store.events import make_turn
from support.store.maintenance import drop, remove, selection
from support.store.redactions import rule
from tracegrad.events import RolloutFinished, Turn
from tracegrad.store import Store
from tracegrad.store.encoding.blobs import BlobContent, json_content, pack_blobs, unpack_json
from tracegrad.store.encoding.shared_texts import MIN_CHARACTERS, TextExtraction, TextSightings
from tracegrad.store.maintenance import examine, redact
from tracegrad.store.models import SharedTexts, Turns, TurnTexts
from tracegrad.store.rows import count_rows

SYSTEM = {"role": "system", "content": prose(1, 6_000)}
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{n}", "description": prose(n, 400)}}
    for n in range(12)
]
FILE = prose(77, 3_000)  # what a tool returns to every rollout

pytestmark = pytest.mark.databases("sqlite")  # blobs are the same in each


def conversation(rollout_id: str, *, turns: int = 3, task: str = "") -> list[Turn]:
    """Each request repeats the one before, and holds what only this rollout has."""
    made: list[Turn] = []
    messages = [SYSTEM, {"role": "user", "content": task or f"{rollout_id}: " + "do it. " * 40}]
    for n in range(turns):
        reply = {"role": "assistant", "content": f"{rollout_id} calls tool {n}. " * 20}
        request = {"model": "m", "tools": TOOLS, "messages": copy.deepcopy(messages)}
        parent, more = made[-1] if made else None, {"response": {"choices": [{"message": reply}]}}
        turn = make_turn(f"{rollout_id}.{n}", rollout_id, parent=parent, request=request, **more)
        made.append(replace(turn, created_at=1000.0 * n))
        call = f"{rollout_id}-{n}"
        result = FILE if n == 0 else f"done {call}"
        messages += [reply, {"role": "tool", "tool_call_id": call, "content": result}]
    return made


def store_conversations(store: Store, names: str) -> None:
    for name in names:
        store.append(conversation(name))


def shared(store: Store) -> tuple[int, int]:
    """Texts, and places that want one."""
    with store.reading() as connection:
        return count_rows(connection, SharedTexts), count_rows(connection, TurnTexts)


def raw_bytes(store: Store) -> int:
    with store.reading() as connection:
        columns = (Turns.request, Turns.response, SharedTexts.blob)
        sums = [connection.scalar(select(func.sum(func.length(each)))) for each in columns]
    return sum(int(each or 0) for each in sums)


@pytest.mark.databases("sqlite", "postgres")
def test_what_rollouts_have_in_common_is_stored_once(store: Store) -> None:
    first, *others = (conversation(f"r{n}") for n in range(8))
    store.append(first)
    assert shared(store) == (0, 0)  # what was seen once costs nothing
    once = raw_bytes(store)
    for turns in others:
        for turn in turns:
            store.append([turn])
    # Tools, the system prompt, and the file that each of them reads.
    assert shared(store) == (3, 7 * 3)
    # The texts a second time, and of each rollout only what it says itself.
    assert raw_bytes(store) < 2 * once + 6 * 0.2 * once
    for turns in (first, *others):
        assert store.rollout_turns(turns[0].rollout_id) == turns
        assert store.find_turn(turns[-1].turn_id) == turns[-1]
    assert found(store, "texts") == []


def test_samples_of_one_task_share_its_whole_prompt(store: Store) -> None:
    samples = [conversation(f"s{n}", turns=1, task=prose(5, 2_000)) for n in range(4)]
    for turns in samples:
        store.append(turns)
    # Tools, and all messages as one.
    assert shared(store) == (2, 3 * 2)
    for turns in samples:
        assert store.rollout_turns(turns[0].rollout_id) == turns


@pytest.mark.databases("sqlite", "postgres")
def test_another_process_learns_by_itself_and_writes_the_same_text_once(
    store: Store, url: str
) -> None:
    store_conversations(store, "ab")
    with Store.open(url) as other:
        store_conversations(other, "cde")
        assert shared(other) == (3, 3 * 3)
    assert store.rollout_turns("e") == conversation("e")


def test_a_long_reply_that_comes_again_is_stored_once(store: Store) -> None:
    # Numbers before the text do not count against the bound on what is looked at.
    reply = {"logprobs": [[0.5] * 9] * 999, "choices": [{"message": {"content": prose(9, 2_000)}}]}
    turns = [make_turn(f"t{n}", f"r{n}", response={**reply, "id": n}) for n in range(3)]
    for turn in turns:
        store.append([turn])
    assert shared(store) == (1, 2)
    assert [store.find_turn(turn.turn_id) for turn in turns] == turns


@pytest.mark.databases("sqlite", "postgres")
def test_texts_that_json_says_in_its_own_way(store: Store) -> None:
    odd = {"role": "user", "content": "\ud800 \x00 é" + "x" * MIN_CHARACTERS, "n": 2**80}
    request = {"messages": [odd, {"\udc00": "y" * MIN_CHARACTERS, "k\n": "z" * MIN_CHARACTERS}]}
    for name in ("a", "b", "c"):
        store.append([make_turn(f"{name}.0", name, request=request)])
    assert shared(store)[0] == 1
    assert [store.rollout_turns(name)[0].request for name in "abc"] == [request] * 3
    assert found(store, "texts") == []


@pytest.mark.databases("sqlite", "postgres")
def test_a_text_goes_with_the_last_rollout_that_has_it(store: Store) -> None:
    names = ("a", "b", "c")
    for name in names:
        store.append([*conversation(name), RolloutFinished(rollout_id=name, finished_at=1.0)])
    assert shared(store) == (3, 6)
    for name, left in (("b", (3, 3)), ("c", (0, 0)), ("a", (0, 0))):
        remove(store, name)
        assert shared(store) == left
    assert store.rollouts() == []


@pytest.mark.databases("sqlite", "postgres")
def test_writers_go_on_after_a_text_was_taken_out(store: Store, url: str) -> None:
    """They remember it as stored."""
    store_conversations(store, "abc")
    with Store.open(url) as care:
        remove(care)
        assert shared(care) == (0, 0)
    for name in ("d", "e"):
        store.append(conversation(name))
        assert store.rollout_turns(name) == conversation(name)
    assert found(store, "texts") == []


@pytest.mark.databases("sqlite", "postgres")
def test_dropped_texts_take_the_shared_ones_along(store: Store) -> None:
    store_conversations(store, "abc")
    drop(store, before=1500.0)
    # The last request of each is encoded again: what it shares with the others is shared again.
    for name in ("a", "b", "c"):
        *dropped, last = store.rollout_turns(name)
        assert [turn.request for turn in dropped] == [None, None]
        assert last == conversation(name)[-1]
    assert found(store, "texts") == []
    assert shared(store)[0] == 3
    drop(store)
    assert shared(store) == (0, 0)


def test_redaction_reaches_shared_texts(store: Store) -> None:
    secret = SYSTEM["content"][100:160]
    store_conversations(store, "abcd")
    redact(store, rule(secret, selection=selection("b")))
    # The others, which were not selected, keep the text that they have.
    assert store.rollout_turns("c") == conversation("c")
    assert secret not in str(store.rollout_turns("b"))
    redact(store, rule(secret))
    for turns in map(store.rollout_turns, "abcd"):
        assert secret not in str(turns)
        assert FILE in str(turns)
    with store.reading() as connection:
        blobs = connection.execute(select(SharedTexts.blob)).scalars().all()
    assert blobs
    assert secret not in str([unpack_json(blob) for blob in blobs])
    assert found(store, "texts") == []


@pytest.mark.parametrize(
    ("statement", "check"),
    [
        ("UPDATE texts SET blob = ?", "is not the one that was stored"),
        ("DELETE FROM texts WHERE length(blob) <> ?", "is not stored"),
    ],
)
def test_the_doctor_names_damaged_and_missing_texts(
    store: Store, url: str, statement: str, check: str
) -> None:
    store_conversations(store, "ab")
    corrupt(url, statement, b"\x10garbage" if "UPDATE" in statement else 0)
    report = examine(store)
    assert not report.ok
    assert any(check in finding.message for finding in report.findings if finding.check == "texts")
    assert {f.subject for f in report.findings if f.subject.startswith("turn b")} >= {"turn b.0"}


@pytest.mark.databases("sqlite", "postgres")
def test_the_doctor_takes_out_texts_that_nobody_wants(store: Store, url: str) -> None:
    store_conversations(store, "ab")
    corrupt(url, "DELETE FROM turn_texts")
    corrupt(url, "UPDATE turns SET request = NULL, request_base = NULL, request_marks = NULL")
    [finding] = found(store, "texts")
    assert "3 shared texts that no turn wants" in finding.message
    assert found(store, "texts", fix=True)[0].fixed
    assert shared(store) == (0, 0)
    assert found(store, "texts") == []


@pytest.mark.databases("sqlite", "postgres")
def test_threads_that_write_the_same_texts_at_once(store: Store) -> None:
    rollouts = [conversation(f"r{n}") for n in range(24)]

    def write(turns: list[Turn]) -> None:
        for turn in turns:
            store.append([turn])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, rollouts))
    assert shared(store)[0] == 3
    for turns in rollouts:
        assert store.rollout_turns(turns[0].rollout_id) == turns
    assert found(store, "texts") == []


def test_a_turn_written_twice_shares_once(store: Store) -> None:
    store_conversations(store, "ab")
    before = shared(store)
    store.append(conversation("b"))
    store.append([replace(conversation("b")[0], request={"other": True})])
    assert shared(store) == before
    assert store.rollout_turns("b") == conversation("b")


# What is taken out, and put back, without a database.

_words = st.sampled_from([prose(n, MIN_CHARACTERS + 10 * n) for n in range(4)] + ["short", ""])
_values = st.recursive(
    st.one_of(
        _words,
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["content", "a", "b\n", ""]), inner, max_size=4),
    ),
    max_leaves=20,
)
_requests = st.dictionaries(st.sampled_from(["messages", "tools", "model"]), _values, max_size=3)


@given(st.lists(st.tuples(_requests, _values), min_size=2, max_size=5))
@example([({}, {"": [prose(1, MIN_CHARACTERS), 1 - 2**63 - 2]})] * 2)
@settings(deadline=None, max_examples=200)
def test_whatever_is_lifted_is_put_back(calls: list[tuple[dict[str, Any], Any]]) -> None:
    repeats = TextSightings()
    for number, (request, response) in enumerate(calls):
        given_ = copy.deepcopy((request, response))
        lifting = TextExtraction(f"r{number}", repeats)
        kept = {"request": lifting.request(request, whole=True)}
        kept["response"] = lifting.response(response)
        assert (request, response) == given_
        back = copy.deepcopy(kept)
        for path, digest in lifting.places:
            place = back
            for step in path[:-1]:
                place = place[step]
            assert place[path[-1]] is None
            place[path[-1]] = _read(lifting.texts[digest])
        assert back == {"request": request, "response": response}
        # Nothing that repeats and is long stays, but for what is not looked at.
        again = TextExtraction("again", repeats)
        left = {"request": again.request(request, whole=True)}
        assert not any(len(text) >= MIN_CHARACTERS for text in _texts(left["request"]))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key.isprintable():
                yield from _texts(item)


def _read(text: BlobContent) -> Any:
    value = unpack_json(pack_blobs([text])[0])
    assert json_content(value) == text
    return value


def test_memory_of_what_was_seen_is_bounded() -> None:
    repeats = TextSightings(most=10)
    digests = [bytes([n]) for n in range(40)]
    assert not any(repeats.seen_elsewhere(digest, "a") for digest in digests)
    assert [repeats.seen_elsewhere(digest, "b") for digest in digests[-10:]] == [True] * 10
    repeats.remember(digests[-10:])
    assert repeats.missing(digests[-10:]) == set()
    assert not repeats.seen_elsewhere(digests[0], "b")
    assert repeats.missing(digests[-10:]) == {digests[-10]}
    repeats.forget()
    assert repeats.missing(digests[-10:]) == set(digests[-10:])

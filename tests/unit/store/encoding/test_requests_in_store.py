"""Requests through the store: found again from any turn, small on the disk, proven when read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.exc import IntegrityError

from support.store.conversations import column
from support.store.corruption import corrupt, set_columns
from support.store.english_text import prose
from support.store.events import make_turn
from tracegrad.events import Json, Turn, logprob_array, new_id
from tracegrad.store import EventRejected, Store, StoreCorrupt
from tracegrad.store.databases import database_at
from tracegrad.store.models import Turns

CHARACTERS_A_TOKEN = 4.4  # of English, in vocabularies of 150,000
VOCABULARY = 151_936

pytestmark = pytest.mark.databases("sqlite")  # blobs are the same in each


def say(role: str, number: int, characters: int = 400) -> Json:
    return {"role": role, "content": prose(number * 50, characters)}


def chat(turns: int, rollout: str = "r", *, linked: bool = True) -> list[Turn]:
    """A conversation of growing requests; its turns are parent and child, or all roots."""
    made: list[Turn] = []
    messages = [say("system", 0, 1000)]
    for number in range(turns):
        messages = [*messages, say("user", 2 * number)]
        reply = say("assistant", 2 * number + 1)
        request = {"model": "m", "messages": messages, "stream": True}
        parent = made[-1] if made and linked else None
        turn_id = f"{rollout}.{number:03d}"
        made.append(make_turn(turn_id, rollout, parent=parent, request=request,
                              response={"choices": [{"message": reply}]}))  # fmt: skip
        messages = [*messages, reply]
    return made


@pytest.mark.databases("sqlite", "postgres")
@pytest.mark.parametrize("linked", [True, False], ids=["tree", "all roots"])
def test_a_conversation_costs_its_length_once_and_comes_back(store: Store, linked: bool) -> None:
    turns = chat(60, linked=linked)
    for turn in turns:
        store.append([turn])
    assert store.rollout_turns("r") == turns
    for turn in turns[::13]:
        assert store.find_turn(turn.turn_id) == turn
    bases = column(store, "request_base")
    assert [bases[turn.turn_id] for turn in turns] == [None, *[t.turn_id for t in turns[:-1]]]
    stored = [len(blob) for blob in column(store, "request").values()]
    assert max(stored[1:]) < 450, "a message of 400 characters, each time"
    assert all(turn.request is None for turn in store.rollout_turns("r", raw=False))


@pytest.mark.databases("sqlite", "postgres")
def test_another_process_goes_on_with_the_conversation(store: Store, url: str) -> None:
    turns = chat(6)
    store.append(turns[:3])
    with Store.open(url) as other:
        other.append(turns[3:4])
        other.append(turns[4:])
        assert column(other, "request_base")["r.003"] == "r.002"
    assert store.rollout_turns("r") == turns


def test_a_whole_rollout_in_one_batch_is_stored_as_deltas(store: Store) -> None:
    turns = chat(10)
    store.append(turns)
    assert store.rollout_turns("r") == turns
    assert column(store, "request_base")["r.005"] == "r.004"


def test_samples_of_one_call_share_all_of_its_request(store: Store) -> None:
    [root, call] = chat(2)
    store.append([root])
    samples = [replace(call, turn_id=f"s{n}") for n in range(4)]
    store.append(samples)
    assert store.rollout_turns("r") == [root, *samples]
    assert column(store, "request_base") == {
        "r.000": None, "s0": "r.000", "s1": "s0", "s2": "s1", "s3": "s2"
    }  # fmt: skip
    assert len(column(store, "request")["s3"]) < 30


def test_a_fork_is_a_delta_to_a_turn_that_is_not_its_parent(store: Store) -> None:
    turns = chat(4)
    fork = replace(make_turn("fork", new=[9, 9], request=turns[3].request), fork_reason="template")
    store.append(turns)
    store.append([fork])
    assert column(store, "request_base")["fork"] == "r.003"
    assert store.find_turn("fork") == fork
    assert store.rollout_turns("r") == [*turns, fork]


def test_rollouts_share_nothing(store: Store) -> None:
    for rollout in ("a", "b"):
        store.append(chat(2, rollout))
    assert column(store, "request_base")["b.000"] is None


@pytest.mark.databases("sqlite", "postgres")
def test_turns_sent_again_do_not_mislead_later_ones(store: Store, url: str) -> None:
    """What is stored counts, also where the second sending was a delta to something else."""
    turns = chat(5, linked=False)
    store.append(turns[:3])
    with Store.open(url) as other:  # knows nothing of them yet
        other.append([turns[4], turns[2], turns[1]])
        other.append([turns[3]])
        assert other.rollout_turns("r") == [*turns[:3], turns[4], turns[3]]
    changed = replace(turns[0], request={"messages": [say("user", 900, 5000)]})
    child = replace(make_turn("child", parent=turns[0]), request=changed.request)
    store.append([changed, child])
    assert store.find_turn("r.000") == turns[0], "the first sending counts"
    assert store.find_turn("child") == child


@pytest.mark.databases("sqlite", "postgres")
def test_turns_that_were_deleted_meanwhile_are_not_relied_on(store: Store, url: str) -> None:
    turns = chat(4, linked=False)
    store.append(turns[:2])
    corrupt(url, "DELETE FROM turns WHERE turn_id = 'r.001'")
    store.append([turns[2]])
    assert column(store, "request_base")["r.002"] is None
    with pytest.raises(EventRejected, match=r"turn r\.001, parent of child, is not stored"):
        store.append([make_turn("child", parent=turns[1])])
    store.append([turns[3]])
    assert store.rollout_turns("r") == [turns[0], *turns[2:]]


def test_a_reply_of_many_log_probabilities_is_still_recognized(store: Store) -> None:
    reply = say("assistant", 3, 3000)
    scores = [{"token": "x", "logprob": -0.5, "top_logprobs": [{"token": "y"}] * 20}] * 600
    choice = {"message": reply, "logprobs": {"content": scores}}
    messages = [say("user", 1), reply, say("user", 5)]
    first = make_turn("a", request={"messages": messages[:1]}, response={"choices": [choice]})
    second = make_turn("b", parent=first, request={"messages": messages})
    store.append([first, second])
    assert store.find_turn("b") == second
    assert len(column(store, "request")["b"]) < 500


@pytest.mark.parametrize("request_", [{}, {"messages": []}, None])
def test_an_empty_request_comes_back(store: Store, request_: Json | None) -> None:
    turn = make_turn("t", request=request_)
    store.append([turn, replace(turn, turn_id="u")])
    assert [t.request for t in store.rollout_turns("r")] == [request_, request_]


def test_a_request_nested_too_deeply_is_refused_by_name(store: Store) -> None:
    deep: Any = "x" * 300
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EventRejected, match="request: turn t has one that is nested too deeply"):
        store.append([make_turn("t", request={"messages": deep})])
    with pytest.raises(EventRejected, match="response: turn t has one that is nested too"):
        store.append([make_turn("t", response={"choices": deep})])


def test_a_request_nested_as_deep_as_python_goes_comes_back(store: Store) -> None:
    deep: Any = "x" * 300
    for _ in range(400):  # orjson stops at 254
        deep = [deep]
    turns = [make_turn(f"t{n}", request={"messages": [say("user", 1), deep]}) for n in range(2)]
    for turn in turns:
        store.append([turn])
    assert store.rollout_turns("r") == turns


# What is broken is noticed


@pytest.mark.parametrize("name", ["request", "request_marks"])
def test_a_base_that_changed_is_noticed_by_its_deltas(store: Store, name: str) -> None:
    store.append(chat(4))
    other = chat(1, "other")[0]
    store.append([replace(other, request={"messages": [say("user", 77, 3000)], "model": "m"})])
    set_columns(store, "r.000", **{name: column(store, name)["other.000"]})
    with pytest.raises(StoreCorrupt, match=r"turn r\.000: its request"):
        store.find_turn("r.003")
    with pytest.raises(StoreCorrupt, match=r"turn r\.000"):
        store.rollout_turns("r")
    assert len(store.rollout_turns("r", raw=False)) == 4, "training needs no texts"


def test_a_base_that_is_gone_is_noticed(store: Store, url: str) -> None:
    turns = chat(3, linked=False)
    store.append(turns)
    corrupt(url, "DELETE FROM turns WHERE turn_id = 'r.001'")
    with pytest.raises(StoreCorrupt, match=r"turn r\.002: turn r\.001, which it continues, is not"):
        store.find_turn("r.002")
    assert store.find_turn("r.000") == turns[0]


@pytest.mark.parametrize("name", ["request", "response", "delta", "logprobs"])
@pytest.mark.parametrize(
    "harm",
    [lambda blob: blob[:-3], lambda blob: blob[:1] + b"?" * 9, lambda blob: b"\x07" + blob[1:]],
    ids=["cut", "overwritten", "tagged"],
)
def test_a_damaged_blob_is_one_line(store: Store, name: str, harm: Any) -> None:
    store.append([make_turn("t", new=range(500), request={"a": "b" * 500}, response={"c": 1})])
    set_columns(store, "t", **{name: harm(column(store, name)["t"])})
    with pytest.raises(StoreCorrupt, match="turn t: ") as caught:
        store.find_turn("t")
    assert "\n" not in str(caught.value)


@pytest.mark.databases("sqlite", "postgres")
def test_a_base_cannot_be_deleted_from_under_others(store: Store) -> None:
    store.append(chat(2, linked=False))
    with pytest.raises(IntegrityError, match=r"(?i)foreign key"), store.appending() as connection:
        connection.execute(text("DELETE FROM turns WHERE turn_id = 'r.000'"))


# Bytes on the disk, with tokens and texts as they are


def on_disk(url: str) -> int:
    """Bytes."""
    engine = create_engine(database_at(url).url)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            size = connection.scalar(text("SELECT pg_database_size(current_database())"))
        else:
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
            size = Path(str(engine.url.database)).stat().st_size
    engine.dispose()
    return int(size or 0)


class Speaker:
    """Agents with English texts, Zipf-distributed ids and log-probabilities of a warm sampler."""

    def __init__(self) -> None:
        self._random = random.Random(3)
        self._weights = [1 / rank for rank in range(1, VOCABULARY + 1)]

    def ids(self, count: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), self._weights, k=count)

    def text(self, tokens: int) -> str:
        return prose(self._random.randrange(10**6), int(tokens * CHARACTERS_A_TOKEN))

    def turn(self, earlier: Turn | None, rollout: str, new: int, sampled: int) -> Turn:
        if earlier is None or earlier.request is None or earlier.response is None:
            before, user = [{"role": "system", "content": self.text(1500)}], new - 1500
        else:
            reply = earlier.response["choices"][0]["message"]
            before, user = [*earlier.request["messages"], reply], new
        messages = [*before, {"role": "user", "content": self.text(user)}]
        reply = {"role": "assistant", "content": self.text(sampled), "tool_calls": []}
        choice = {"index": 0, "message": reply, "logprobs": None, "finish_reason": "stop"}
        scores = [-(self._random.expovariate(1.5) ** 2) for _ in range(sampled)]
        turn = make_turn(
            new_id(),
            rollout,
            parent=earlier,
            new=self.ids(new),
            sampled=self.ids(sampled),
            version=7,
            model="Qwen/Qwen3-8B",
            sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 512},
            finish_reason="stop",
            request={"model": "Qwen/Qwen3-8B", "messages": messages, "temperature": 1.0},
            response={
                "id": f"chatcmpl-{new_id()}",
                "object": "chat.completion",
                "created": 1_790_000_000,
                "choices": [choice],
                "usage": {"prompt_tokens": 8192, "completion_tokens": sampled},
            },
        )
        return replace(turn, completion_logprobs=logprob_array(scores))


@pytest.fixture
def fresh(empty_url: str) -> Iterator[Store]:
    """In a database that never held anything: no space to use again."""
    with Store.open(empty_url) as store:
        yield store


@pytest.mark.databases("sqlite", "postgres")
def test_a_first_turn_and_its_sequels_are_small_on_the_disk(fresh: Store, empty_url: str) -> None:
    """The goal is 45 KB for a first turn of 8,192 + 512 tokens, and only what is new later."""
    store, url = fresh, empty_url
    speaker = Speaker()
    rollouts = [new_id() for _ in range(8)]
    store.append([speaker.turn(None, new_id(), 8192, 512) for _ in range(8)])
    turns = [speaker.turn(None, rollout, 8192, 512) for rollout in rollouts]
    empty = on_disk(url)  # but for what any tables and indexes cost once
    store.append(turns)
    first = (on_disk(url) - empty) / len(rollouts)
    assert first < 38_000
    later = []
    for _ in range(5):
        turns = [speaker.turn(turn, turn.rollout_id, 400, 200) for turn in turns]
        later += turns
        store.append(turns)
    assert store.find_turn(turns[0].turn_id) == turns[0]
    assert (on_disk(url) - empty) / len(rollouts) - first < 5 * 5_200
    blobs = [sum(map(len, row)) for row in blobs_of(store, {turn.turn_id for turn in later})]
    assert sum(blobs) / len(blobs) < 4_000, "600 new tokens, their texts and scores"


def blobs_of(store: Store, turn_ids: set[str]) -> list[tuple[bytes, ...]]:
    columns = (Turns.delta, Turns.completion, Turns.logprobs, Turns.request, Turns.response)
    with store.reading() as connection:
        rows = connection.execute(select(*columns).where(Turns.turn_id.in_(turn_ids)))
        return [tuple(row) for row in rows]

"""Requests stored as deltas to earlier ones come back as they were, and cost only what is new."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.store.english_text import prose
from tracegrad.events import Json
from tracegrad.jsonutil import dump_json
from tracegrad.store import StoreCorrupt
from tracegrad.store.encoding import request_restore
from tracegrad.store.encoding.request_delta import BaseCandidate, RequestDelta, make_delta
from tracegrad.store.encoding.request_fingerprint import RequestFingerprint, prefix_lengths
from tracegrad.store.encoding.request_restore import RestoredRequest, restore_request

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates, NUL
LONG_TEXT = st.builds(
    lambda text, times: text * times, st.text(min_size=1, max_size=9), st.just(60)
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXT
    | LONG_TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(["messages", "input", "contents", "prompt", "tools", "system", "é", "n"])
REQUESTS = st.dictionaries(
    KEYS | ANY_TEXT, VALUES | st.lists(VALUES, max_size=12) | LONG_TEXT, max_size=6
)


@st.composite
def sequels(draw: st.DrawFn, request: Json) -> Json:
    """What a client may send next: anything, mostly the same."""
    changed = copy.deepcopy(request)
    for key in list(changed):
        value = changed[key]
        match draw(st.sampled_from(["keep", "extend", "cut", "change", "drop", "keep"])):
            case "extend" if isinstance(value, list):
                value += draw(st.lists(VALUES, max_size=3))
            case "extend" if isinstance(value, str):
                changed[key] = value + draw(LONG_TEXT)
            case "cut" if isinstance(value, list | str):
                changed[key] = value[: draw(st.integers(0, len(value)))]
            case "change" if isinstance(value, list) and value:
                value[draw(st.integers(0, len(value) - 1))] = draw(VALUES)
            case "change":
                changed[key] = draw(VALUES)
            case "drop":
                del changed[key]
    changed |= draw(st.dictionaries(KEYS, VALUES, max_size=2))
    if draw(st.booleans()):
        changed = dict(sorted(changed.items(), reverse=True))
    return changed


@st.composite
def rollouts(draw: st.DrawFn) -> list[tuple[Json, Any]]:
    """Requests and replies, each request new or the sequel of any earlier one."""
    made: list[tuple[Json, Any]] = []
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from([None, *[request for request, _ in made]]))
        request = draw(REQUESTS) if before is None else draw(sequels(before))
        made.append((request, draw(st.none() | VALUES)))
    return made


def stored(shared: RequestDelta) -> Any:
    return json.loads(dump_json(shared.text))


class Deltas:
    """Shares requests with all earlier ones, and rebuilds them from nothing but what is stored."""

    def __init__(self) -> None:
        self.shared: list[RequestDelta] = []
        self._rebuilt: dict[str, RestoredRequest] = {}

    def add(self, request: Json, response: Any = None) -> Json:
        earlier = [
            BaseCandidate(str(number), RequestFingerprint.decode(shared.fingerprint))
            for number, shared in reversed(list(enumerate(self.shared)))
        ]
        before = copy.deepcopy(request)
        shared = make_delta(request, response, earlier)
        assert dump_json(request) == dump_json(before), "the caller's request is as it was"
        base = self._rebuilt[shared.base] if shared.base is not None else None
        response = json.loads(dump_json(response))
        found = restore_request(stored(shared), response, shared.fingerprint, base)
        self._rebuilt[str(len(self.shared))] = found
        self.shared.append(shared)
        return found.request

    @property
    def last(self) -> RequestDelta:
        return self.shared[-1]

    @property
    def size(self) -> int:
        """Bytes that the last request costs."""
        return len(dump_json(self.last.text)) + len(self.last.fingerprint)


@settings(max_examples=150, deadline=None)
@given(rollouts())
def test_any_requests_come_back_as_json_has_them(made: list[tuple[Json, Any]]) -> None:
    deltas = Deltas()
    for request, response in made:
        back = deltas.add(request, response)
        # Lone surrogates that make a pair become one character in any JSON.
        assert back == json.loads(dump_json(request))
        assert list(back) == list(json.loads(dump_json(request))), "in the order they were sent in"


ODD: dict[str, Json] = {
    "huge": {"seed": 2**70, "messages": [{"role": "user", "content": "é" * 300}] * 3},
    "surrogates": {"messages": [{"n": 2**64}, {"text": "\ud800" * 300}], "system": "\udfff" * 300},
    "keys": {"\ud800": "x" * 300, "a": ["\ud83d", "\ude00" * 200]},
    "empty": {"messages": None, "tools": [], "system": "", "stop": [[], {}], "": "x" * 300},
    "ids": {"prompt": list(range(500)), "prefix": [[1, 2], [3]] * 40},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_json_comes_back_and_is_shared(name: str) -> None:
    deltas = Deltas()
    request = ODD[name]
    assert deltas.add(request) == request
    assert deltas.add(request) == request
    assert deltas.last.base == "0"
    longer = {**request, "messages": [*(request.get("messages") or []), {"new": 2**80}]}
    assert deltas.add(longer) == longer


def test_numbers_come_back_to_the_last_bit() -> None:
    numbers = {"a": 1e-320, "b": 1.7976931348623157e308, "c": 1e22, "d": 2**64 - 1, "e": 0.1 + 0.2}
    assert Deltas().add({"n": [numbers] * 20}) == {"n": [numbers] * 20}
    assert str(Deltas().add({"top_p": -0.0})["top_p"]) == "-0.0"


def test_what_is_no_json_becomes_what_json_makes_of_it() -> None:
    deltas = Deltas()
    odd: Any = {"a": [float("nan"), {3: (1, 2)}, object], "b": [None] * 50, 7: "x" * 300}
    for _ in range(2):
        assert deltas.add(odd) == json.loads(dump_json(odd))
    assert deltas.last.base == "0"


# What real clients do


def conversation(turns: int, text: int = 600) -> list[tuple[Json, Json]]:
    """Chat requests and replies; the texts of no two messages are alike."""
    tools = [{"type": "function", "function": {"name": f"t{i}", "description": prose(i, 300)}}
             for i in range(4)]  # fmt: skip
    messages: list[Json] = [{"role": "system", "content": prose(1000, 2000)}]
    made = []
    for number in range(turns):
        messages = [*messages, {"role": "user", "content": prose(2000 + 10 * number, text)}]
        request = {"model": "m", "messages": messages, "temperature": 1.0, "tools": tools}
        reply = {"role": "assistant", "content": prose(50_000 + 10 * number, text)}
        made.append((request, {"id": f"c{number}", "choices": [{"message": reply}]}))
        messages = [*messages, reply]
    return made


def test_a_later_turn_costs_its_new_messages_without_the_reply_it_repeats() -> None:
    deltas = Deltas()
    for number, (request, response) in enumerate(conversation(40)):
        assert deltas.add(request, response) == request
        if number:
            assert deltas.last.base == str(number - 1)
            assert deltas.size < 600 + 400, "one message, digests, and the frame around them"


def test_a_very_long_conversation_has_small_marks() -> None:
    marks = make_delta({"messages": [{"content": prose(0, 100)}] * 10_000}, None, []).fingerprint
    assert len(marks) < 250


def marked(request: Json) -> Json:
    """As Anthropic's clients do: the last two user messages carry a mark for the cache."""
    messages = copy.deepcopy(request["messages"])
    for message in [m for m in messages if m["role"] == "user"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    for message in [m for m in messages if m["role"] == "user"][-2:]:
        message["content"][-1]["cache_control"] = {"type": "ephemeral"}
    system = [{"type": "text", "text": messages[0]["content"]}]
    return {**request, "system": system, "messages": messages[1:]}


def test_marks_that_move_do_not_cost_the_texts_they_stood_at() -> None:
    deltas = Deltas()
    for number, (request, response) in enumerate(conversation(30, text=3000)):
        sent = marked(request)
        assert deltas.add(sent, response) == sent
        if number:
            assert deltas.size < 3000 + 1200, "the new message, and the outer parts of four others"


@pytest.mark.parametrize("key", ["messages", "input", "contents", "anything"])
def test_a_list_is_shared_whatever_it_is_called(key: str) -> None:
    deltas = Deltas()
    items = [{"parts": [{"text": prose(10 * i, 500)}]} for i in range(20)]
    deltas.add({key: items[:18], "model": "m"})
    assert deltas.add({key: items, "model": "m"})[key] == items
    assert stored(deltas.last) == [None, {key: [18, items[18:]]}, []]


def test_values_that_stay_are_not_stored_again() -> None:
    deltas = Deltas()
    config = {"responseSchema": {"type": "object", "properties": {"a": {"d": prose(0, 400)}}}}
    same = {"systemInstruction": config, "tools": [config] * 3, "instructions": prose(1, 900)}
    deltas.add({**same, "contents": [1]})
    deltas.add({**same, "contents": [2]})
    assert stored(deltas.last) == [{**dict.fromkeys(same), "contents": [2]}, {}, []]


def test_a_prompt_that_grows_is_stored_by_what_it_grew() -> None:
    deltas = Deltas()
    for end in range(1000, 5000, 500):
        request = {"model": "m", "prompt": prose(0, end)}
        assert deltas.add(request) == request
        assert end == 1000 or deltas.size < 800
    ids = list(range(100_000, 103_000))
    deltas.add({"prompt": ids[:2500]})
    assert deltas.add({"prompt": ids})["prompt"] == ids
    assert stored(deltas.last)[1] == {"prompt": [2500, ids[2500:]]}


def test_an_edited_history_keeps_what_comes_before_the_edit() -> None:
    """Where the edit lies far from the end, at least half of what is left before it."""
    messages = [{"role": "user", "content": prose(10 * i, 500)} for i in range(100)]
    for at in (99, 98, 90, 60, 20):
        deltas = Deltas()
        deltas.add({"messages": messages})
        edited = [*messages[:at], {"role": "user", "content": "edited"}, *messages[at + 1 :]]
        assert deltas.add({"messages": edited})["messages"] == edited
        kept = stored(deltas.last)[1]["messages"][0] if deltas.last.base else 0
        assert 100 - 2 * (100 - at) <= kept <= at


def test_a_request_is_a_delta_to_the_one_it_shares_most_with() -> None:
    """Sub-agents take turns in one rollout, each with a conversation of its own."""
    deltas = Deltas()
    for number in range(10):
        for agent in (0, 1):
            texts = [prose(100_000 * agent + 100 * i, 500) for i in range(number + 2)]
            request = {"messages": [{"role": "user", "content": text} for text in texts]}
            assert deltas.add(request) == request
            if number:
                assert deltas.last.base == str(2 * (number - 1) + agent)


def test_a_request_without_anything_in_common_is_whole() -> None:
    deltas = Deltas()
    deltas.add({"messages": [{"content": prose(0, 500)}], "model": "m"})
    other = {"messages": [{"content": prose(9000, 500)}], "model": "m"}
    deltas.add(other)
    assert deltas.last.base is None
    assert deltas.last.text == other


def test_a_conversation_is_rebuilt_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    plainly = request_restore.encode_any

    def counting(items: list[Any]) -> bytes:
        nonlocal hashed
        data = plainly(items)
        hashed += len(data)
        return data

    monkeypatch.setattr(request_restore, "encode_any", counting)
    deltas = Deltas()
    made = conversation(100)
    for request, response in made:
        deltas.add(request, response)
    whole = len(dump_json(made[-1][0]))
    assert hashed < 4 * whole, "not the whole of it for every turn"


# What is broken is noticed


def rebuilt_after(change: Any, number: int = 2) -> Json:
    """The conversation's last request, after `change` to what is stored of request `number`."""
    made = conversation(4)
    base: RestoredRequest | None = None
    earlier: list[BaseCandidate] = []
    for index, (request, response) in enumerate(made):
        shared = make_delta(request, response, earlier)
        text, marks = stored(shared), shared.fingerprint
        if index == number:
            text, marks = change(text, marks)
        base = restore_request(text, response, marks, base)
        earlier = [BaseCandidate("b", RequestFingerprint.decode(shared.fingerprint))]
    assert base is not None
    return base.request


def test_nothing_changed_is_nothing_noticed() -> None:
    assert rebuilt_after(lambda text, marks: (text, marks)) == conversation(4)[-1][0]


def _edit(path: list[Any], value: Any) -> Any:
    def change(text: Any, marks: bytes) -> tuple[Any, bytes]:
        place = text
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return text, marks

    return change


@pytest.mark.parametrize(
    "change",
    [
        _edit([1, "messages", 1, -1, "content"], "other words"),
        _edit([1, "messages", 0], 1),
        _edit([1, "messages"], [0, []]),
        _edit([1], {}),
        _edit([0], {"model": "n", "messages": None, "temperature": 1.0, "tools": None}),
        _edit([0], 5),
        _edit([2], []),
        _edit([2, 0, 1], "00" * 8),
        _edit([2, 0, 0], ["tools", 0]),
        lambda text, marks: (text, marks[:-9]),
        lambda text, marks: (text, marks.replace(b"\n", b"")),
        lambda text, marks: ({"messages": []}, marks),
        lambda text, marks: (None, marks),
    ],
)
def test_a_changed_request_is_noticed(change: Any) -> None:
    with pytest.raises(StoreCorrupt):
        rebuilt_after(change)


@given(st.sampled_from(["list", "text", "one"]), st.integers(1, 10**6))
@example("text", 64)
def test_positions_reach_back_by_doubling(kind: str, length: int) -> None:
    found = prefix_lengths(kind, length)
    assert found[0] == length
    assert found == sorted(set(found), reverse=True)
    assert found[-1] > 0
    gaps = [length - position for position in found[1:]]
    assert all(b == 2 * a for a, b in pairwise(gaps))
    assert 2 * gaps[-1] >= length if gaps else length <= 64

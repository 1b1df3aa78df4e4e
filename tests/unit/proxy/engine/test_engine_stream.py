"""An engine's stream, however its bytes are cut and whatever it has in its fields."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import getitem
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.dialect_adapters import CHAT, COMPLETIONS, EVERY_DIALECT, DialectAdapter
from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.http import sse

HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
TEXT_HEAD = {**HEAD, "object": "text_completion"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


def a_call(adapter: DialectAdapter) -> Call:
    call = adapter.parse(orjson.dumps(adapter.plain))
    assert isinstance(call, Call)
    return replace(call, stream=True, turn_id="t")


def a_chunk(delta: Json, token: int, **more: Any) -> Json:
    entry = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    choice = {"index": 0, "delta": delta, "logprobs": {"content": [entry]}, "finish_reason": None}
    return {**HEAD, "choices": [{**choice, "token_ids": [token], **more}]}


def a_text(text: str, tokens: list[int] | None, **more: Any) -> Json:
    logprobs = None
    if tokens:
        logprobs = {"tokens": ["x"], "token_logprobs": [-0.5], "text_offset": [0]}
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
    return {**TEXT_HEAD, "choices": [{**choice, "token_ids": tokens, **more}]}


def chunks_for(adapter: DialectAdapter) -> list[Json]:
    if adapter is COMPLETIONS:
        return [
            a_text("", None, prompt_token_ids=[1, 2]),
            a_text("ä€😀", [3]),
            a_text("\r\n\n", [4], finish_reason="stop"),
            {**TEXT_HEAD, "choices": [], "usage": dict(USAGE)},
        ]
    call = {"id": "a", "type": "function", "index": 0}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return [
        {**HEAD, "choices": [opening], "prompt_token_ids": [1, 2]},
        a_chunk({"reasoning": "hm 😀"}, 3),
        a_chunk({"content": "ä€😀"}, 4),
        a_chunk({"content": "\r\n\n data: x"}, 5),
        a_chunk({"tool_calls": [{**call, "function": {"name": "f", "arguments": "{}"}}]}, 6),
        a_chunk({}, 7, finish_reason="tool_calls", stop_reason=None),
        {**HEAD, "choices": [], "usage": dict(USAGE)},
    ]


def passed(call: Call, adapter: DialectAdapter, pieces: list[bytes]) -> tuple[list[Json], Any]:
    """What the client reads, and what is recorded, at one moment: answers name the second."""
    with patch.object(time, "time", lambda: 1e9):
        return _passed(call, adapter, pieces)


def _passed(call: Call, adapter: DialectAdapter, pieces: list[bytes]) -> tuple[list[Json], Any]:
    stream, writer = EngineStream(call, lambda: 3), adapter.dialect.writer(call)
    out: list[bytes] = []
    for piece in pieces:
        if chunks := stream.feed(piece):
            out += [] if out else [writer.begin(stream.prompt_tokens)]
            out += [each if isinstance(each, bytes) else writer.chunk(each) for each in chunks]
    recorded = [(c.token_ids, c.logprobs, c.response) for c in stream.completions()]
    assert stream.done
    assert stream.error is None
    out.append(writer.end(stream.tail))
    datas = [sse.event_data(event) for event in sse.EventBuffer().feed(b"".join(out))]
    return [orjson.loads(data) for data in datas if data not in (None, sse.DONE)], recorded


def events(adapter: DialectAdapter, line_end: bytes) -> bytes:
    said = [*map(orjson.dumps, chunks_for(adapter)), sse.DONE]
    return b": up" + line_end * 2 + b"".join(b"data: %b%b" % (one, line_end * 2) for one in said)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(at)]


every_dialect = pytest.mark.parametrize("adapter", EVERY_DIALECT, ids=str)


@every_dialect
@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=12), line_end=st.sampled_from([b"\n", b"\r\n"])
)
def test_cuts_change_neither_what_is_shown_nor_what_is_recorded(
    adapter: DialectAdapter, cuts: list[int], line_end: bytes
) -> None:
    call = a_call(adapter)
    data = events(adapter, line_end)
    whole = passed(call, adapter, [events(adapter, b"\n")])
    assert whole[1][0][0].tolist() == ([3, 4] if adapter is COMPLETIONS else [3, 4, 5, 6, 7])
    assert passed(call, adapter, pieces_of(data, cuts)) == whole


@every_dialect
def test_every_cut_of_one_byte(adapter: DialectAdapter) -> None:
    call, data = a_call(adapter), events(adapter, b"\r\n")
    whole = passed(call, adapter, [data])
    assert passed(call, adapter, [data[at : at + 1] for at in range(len(data))]) == whole


@pytest.mark.parametrize("value", [5, True, "s", ["s"], {"a": 5}, {"content": 5}], ids=repr)
@every_dialect
def test_a_field_of_another_type_never_costs_the_turn(adapter: DialectAdapter, value: Any) -> None:
    """It ends the stream where it stands, or changes nothing that matters."""
    call = a_call(adapter)
    for path in paths_in(chunks_for(adapter)):
        chunks = chunks_for(adapter)
        reduce(getitem, path[:-1], chunks)[path[-1]] = value
        stream, writer = EngineStream(call, lambda: 3), adapter.dialect.writer(call)
        for chunk in chunks:
            for each in stream.feed(sse.encode_event(orjson.dumps(chunk))):
                assert isinstance(each, bytes) or writer.chunk(each) is not None
        assert all(completion.response for completion in stream.completions())
        if stream.error is None:
            writer.end(stream.tail)


def paths_in(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in inside:
        found.append((*above, key))
        if isinstance(each, dict | list):
            found += paths_in(each, (*above, key))
    return found


def test_nothing_follows_the_end() -> None:
    stream = EngineStream(a_call(CHAT), lambda: 3)
    stream.feed(events(CHAT, b"\n") + b"data: garbage\n\n")
    stream.feed(sse.encode_event(orjson.dumps(a_chunk({"content": "more"}, 9))))
    assert (stream.done, stream.error) == (True, None)
    assert stream.completions()[0].token_ids.tolist() == [3, 4, 5, 6, 7]


def test_a_large_event_is_joined_once() -> None:
    buffer = sse.EventBuffer()
    pieces = [b"data: ", *([b"x" * 1000] * 50), b""]
    for piece in pieces:
        assert buffer.feed(piece) == []
    assert buffer.rest == pieces[:-1]
    assert buffer.feed(b"\n\ndata: y") == [b"".join(pieces)]
    assert buffer.feed(b"\n\n") == [b"data: y"]


@pytest.mark.parametrize("fast", [False, True])
def test_the_rest_begins_behind_the_last_word_that_was_passed_on(fast: bool) -> None:
    """A letter of several tokens is not whole yet: they are forgotten, and sampled again."""
    stream = EngineStream(replace(a_call(CHAT), stream=True), lambda: 3)
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    sent = [{**HEAD, "choices": [opening], "prompt_token_ids": [1, 2]}]
    sent += [a_chunk({"content": word}, token) for token, word in enumerate("so", 4)]
    sent += [a_chunk({"content": ""}, 6), a_chunk({"content": ""}, 7)]
    for chunk in sent:
        stream.feed(b"data: %b\n\n" % orjson.dumps(chunk))
        if not fast:
            stream._token_chunks = None
    said = stream.said_so_far()
    assert said is not None
    assert (said[0].tolist(), said[1]) == ([1, 2, 4, 5], 2)
    stream.go_on(lambda: 4, 2)
    rest = [
        {**HEAD, "choices": [opening], "prompt_token_ids": [1, 2, 4, 5]},
        a_chunk({"content": "ño"}, 8),
        a_chunk({}, 9, finish_reason="stop"),
        {**HEAD, "choices": [], "usage": dict(USAGE)},
    ]
    shown = [each for chunk in rest for each in stream.feed(b"data: %b\n\n" % orjson.dumps(chunk))]
    assert len(shown) == 1, "neither the prompt nor the role once more"
    [completion] = stream.completions()
    assert completion.prompt_token_ids.tolist() == [1, 2]
    assert completion.token_ids.tolist() == [4, 5, 8, 9]
    assert completion.versions == [(3, 2), (4, 2)]
    assert completion.response["choices"][0]["message"]["content"] == "soño"
    assert completion.response["usage"] == {
        "prompt_tokens": 0, "completion_tokens": 7, "total_tokens": 7
    }  # fmt: skip


def test_nothing_goes_on_of_what_has_ended_or_has_no_tokens() -> None:
    stream = EngineStream(a_call(CHAT), lambda: 3)
    said = stream.said_so_far()
    assert said is not None
    assert (said[0].tolist(), said[1]) == ([], 0), "nothing came: it begins anew"
    stream.feed(b"data: %b\n\n" % orjson.dumps(a_chunk({"content": "a"}, 4)))
    assert stream.said_so_far() is None, "nobody said what the prompt was"
    ended = EngineStream(a_call(CHAT), lambda: 3)
    for chunk in chunks_for(CHAT)[:6]:
        ended.feed(b"data: %b\n\n" % orjson.dumps(chunk))
    assert ended.said_so_far() is None

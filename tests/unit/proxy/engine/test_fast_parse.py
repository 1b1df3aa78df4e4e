"""Answers whose heavy parts are cut out read as they do when all of them is parsed."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.chat.call import Call
from tracegrad.events import Json, token_id_array
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.engine import response as engine
from tracegrad.proxy.engine.fast_parse import extract_prompt, extract_tokens
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import ApiError

VERSION = 4
# Everything that is looked for, as text that an agent may read.
TRAP = 'x "token_ids":[1],"routed_experts":"A" "logprobs":{"content":[ "top_logprobs":[]}]} '
TRAP += '"prompt_token_ids":[9] \\"'


def a_call(**more: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], **more}
    return OpenAIChatDialect().parse(orjson.dumps(body), {}, {})


def experts(tokens: int) -> str | None:
    """Of one layer; of a lonely token there are none."""
    file = io.BytesIO()
    np.save(file, np.arange(tokens, dtype=np.uint8).reshape(tokens, 1, 1))
    return base64.b64encode(file.getvalue()).decode() if tokens else None


def an_answer(prompt: list[int], replies: list[list[tuple[int, float]]], text: str = "hi") -> Json:
    """In vLLM's order of fields."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "reasoning": None},
            "logprobs": {
                "content": [
                    {"token": text, "logprob": value, "bytes": [104], "top_logprobs": []}
                    for _, value in reply
                ]
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [token for token, _ in reply],
            "routed_experts": experts(len(prompt) + len(reply) - 1),
        }
        for index, reply in enumerate(replies)
    ]
    usage = {"prompt_tokens": len(prompt), "total_tokens": 0, "completion_tokens": 0}
    head = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
    tail = {"usage": usage, "prompt_token_ids": prompt, "kv_transfer_params": None}
    return {**head, "choices": choices, **tail}


def read(raw: bytes, call: Call) -> Any:
    try:
        return engine.read_response(raw, call, VERSION)
    except ApiError as error:
        return error.message


def read_whole(raw: bytes, call: Call, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "extract_tokens", lambda *_: None)
        return read(raw, call)


ids = st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=8)
tokens = st.lists(
    st.tuples(st.integers(0, 200_000), st.floats(-50, 0, width=32)), min_size=1, max_size=6
)


@given(ids, st.lists(tokens, min_size=1, max_size=3), st.text(max_size=5))
def test_both_ways_read_the_same(
    prompt: list[int], replies: list[list[tuple[int, float]]], text: str
) -> None:
    raw = orjson.dumps(an_answer(prompt, replies, text + TRAP))
    call = a_call(n=len(replies))
    assert extract_tokens(raw, len(replies)) is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = read_whole(raw, call, monkeypatch)
    answer = read(raw, call)
    assert answer == expected
    for shown in ({"logprobs": True}, {"return_token_ids": True, "logprobs": True}):
        seen = a_call(n=len(replies), **shown)
        with pytest.MonkeyPatch.context() as monkeypatch:
            parsed = read_whole(raw, seen, monkeypatch)
        light = read(raw, seen)
        assert light.completions == parsed.completions
        assert orjson.loads(OpenAIChatDialect().answer(seen, light.body)) == parsed.body
    for reply, reported in zip(answer.completions, replies, strict=True):
        assert reply.prompt_token_ids == token_id_array(prompt)
        assert reply.token_ids.tolist() == [token for token, _ in reported]
        assert reply.logprobs.tolist() == [value for _, value in reported]
        tokens = len(prompt) + len(reported) - 1
        assert (reply.routed_experts or b"").endswith(bytes(range(tokens)))
        assert bool(reply.routed_experts) == (tokens > 0)
    assert TRAP in answer.body["choices"][0]["message"]["content"]


def test_routes_before_the_ids_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = an_answer([1, 2, 3], [[(5, -0.5)], [(7, -1.0)]])
    for choice in answer["choices"]:
        choice["token_ids"] = choice.pop("token_ids")
    call = a_call(n=2, return_token_ids=True)
    raw = orjson.dumps(answer)
    light = read(raw, call)
    assert [reply.routed_experts is None for reply in light.completions] == [False, False]
    assert light == read_whole(raw, call, monkeypatch)
    assert light.body["choices"][1]["routed_experts"] is None


def _changed(answer: Json, path: tuple[Any, ...], value: Any) -> Json:
    at: Any = answer
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return answer


FIRST = ("choices", 0)
ALTERNATIVE = {"token": "a", "logprob": -1.0, "bytes": [1]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prompt_token_ids",), None),
        (("prompt_token_ids",), []),
        (("prompt_token_ids",), [1, -5]),
        (("prompt_token_ids",), [1, 1 << 31]),
        (("prompt_token_ids",), [1, 2.5]),
        (("prompt_token_ids",), ["a"]),
        (("prompt_token_ids",), [1, None]),
        ((*FIRST, "token_ids"), None),
        ((*FIRST, "token_ids"), [1]),
        ((*FIRST, "token_ids"), [1, 1 << 40]),
        ((*FIRST, "routed_experts"), None),
        ((*FIRST, "routed_experts"), 7),
        ((*FIRST, "routed_experts"), "no base64"),
        ((*FIRST, "routed_experts"), ""),
        ((*FIRST, "index"), {"token_ids": [1], "routed_experts": "AAAA"}),
        ((*FIRST, "logprobs"), None),
        ((*FIRST, "logprobs"), {"content": []}),
        ((*FIRST, "logprobs", "content", 0, "logprob"), -9999.0),
        ((*FIRST, "logprobs", "content", 0, "logprob"), "a"),
        ((*FIRST, "logprobs", "content", 1, "top_logprobs"), [ALTERNATIVE]),
        (("choices", 1, "token_ids"), None),
        (("choices", 1, "logprobs"), None),
        (("usage",), None),
        (("kv_transfer_params",), {"prompt_token_ids": [7, 8]}),
        (("choices",), []),
        (FIRST, None),
    ],
)
def test_what_is_written_otherwise_reads_the_same(
    path: tuple[Any, ...], value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [[(5, -0.5), (6, -0.25)], [(7, -1.0)]]
    raw = orjson.dumps(_changed(an_answer([1, 2, 3], replies), path, value))
    call = a_call(n=2)
    assert read(raw, call) == read_whole(raw, call, monkeypatch)


def test_an_answer_that_breaks_off_is_none() -> None:
    raw = orjson.dumps(an_answer([1, 2, 3], [[(5, -0.5)]]))
    for size in range(0, len(raw), 7):
        assert read(raw[:size], a_call()) == "the engine's answer is not a completion"


def test_a_prompt_is_cut_out_of_a_streams_first_chunk() -> None:
    raw = orjson.dumps({"choices": [], "note": TRAP, "prompt_token_ids": [4, 5]})
    rest, prompt = extract_prompt(raw)
    assert orjson.loads(rest) == {"choices": [], "note": TRAP, "prompt_token_ids": None}
    assert prompt == (token_id_array([4, 5]), b"[4,5]")
    assert extract_prompt(b'{"prompt_token_ids":null}') == (b'{"prompt_token_ids":null}', None)
    assert extract_prompt(b'{"prompt_token_ids":[1') == (b'{"prompt_token_ids":[1', None)


def test_an_elsewhere_named_prompt_is_not_the_streams() -> None:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    extra = {"prompt_token_ids": [1, 2]}
    for own, tokens in (({"prompt_token_ids": [3, 4, 5]}, 3), ({}, None)):
        stream = EngineStream(a_call(stream=True), lambda: VERSION)
        chunk = {"id": "a", "choices": [choice], "extra": extra, **own}
        [passed_on] = stream.feed(sse.encode_event(orjson.dumps(chunk)))
        assert stream.error is None
        assert stream.prompt_tokens == tokens
        assert passed_on["extra"] == extra


def test_an_answer_without_the_prompts_ids_is_an_answer_all_the_same() -> None:
    answer = an_answer([1, 2, 3], [[(5, -0.5)]])
    del answer["prompt_token_ids"]
    answer["kv_transfer_params"] = {"prompt_token_ids": [7, 8]}
    [reply] = read(orjson.dumps(answer), a_call()).completions
    assert reply.discard_reason == "no_tokens"


@given(st.lists(st.binary(max_size=6).filter(lambda part: b"\n" not in part), max_size=5))
def test_first_events_come_alone_and_nothing_is_lost(parts: list[bytes]) -> None:
    data = b"\n\n".join(parts)
    pieces = list(sse.split_first_events(data))
    assert b"".join(pieces) == data
    assert len(pieces) <= 3
    assert all(piece.count(b"\n\n") == 1 and piece.endswith(b"\n\n") for piece in pieces[:-1])

"""Chunks that are passed on as they came are recorded, and shown, as if they were read as JSON."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects.openai_chat import ChatStreamWriter, OpenAIChatDialect
from tracegrad.proxy.engine.completion import SampledCompletion
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.engine.token_chunk import MOST_PENDING, TokenChunkReader
from tracegrad.proxy.http import sse

HEAD = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
PROMPT = [1, 2, 3]
# Everything that is looked for, as text that an agent may read.
TRAP = '"},"logprobs":{"content":[{"token":"x","logprob":-1}]},"finish_reason":null,"delta":{'


def a_call(**more: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True, **more}
    return OpenAIChatDialect().parse(orjson.dumps(body), {}, {})


def a_chunk(delta: Json, tokens: list[tuple[int, float]], **more: Any) -> bytes:
    """In vLLM's order of fields."""
    entries = [
        {"token": "é", "logprob": value, "bytes": [195], "top_logprobs": []} for _, value in tokens
    ]
    ids = [token for token, _ in tokens]
    choice = {"index": 0, "delta": delta, "logprobs": {"content": entries}, "finish_reason": None}
    return orjson.dumps({**HEAD, "choices": [{**choice, "token_ids": ids, **more}]})


def the_first() -> bytes:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return orjson.dumps({**HEAD, "choices": [choice], "prompt_token_ids": PROMPT})


def shown_and_recorded(chunks: list[bytes], call: Call, *, as_json: bool) -> tuple[list[Json], Any]:
    """Weights are pushed in the middle of it."""
    version = 4
    stream = EngineStream(call, lambda: version)
    shown: list[Json] = []
    with pytest.MonkeyPatch.context() as patch:
        if as_json:
            patch.setattr(TokenChunkReader, "learn", lambda *_: None)
        for at, chunk in enumerate((the_first(), *chunks)):
            version = 5 if at > len(chunks) // 2 else 4
            for one in stream.feed(sse.encode_event(chunk)):
                shown.append(as_chunk(one))
    error = stream.error and stream.error.message
    return shown, (stream.completions(), stream.tail, error)


def as_chunk(one: Json | bytes) -> Json:
    """As its client reads it."""
    event = one if isinstance(one, bytes) else ChatStreamWriter().chunk(one)
    data = sse.event_data(event.removesuffix(b"\n\n"))
    assert data is not None
    chunk: Json = orjson.loads(data)
    return chunk


def check(chunks: list[bytes], **asked: Any) -> None:
    call = a_call(**asked)
    fast = shown_and_recorded(chunks, call, as_json=False)
    assert fast[0][0].get("prompt_token_ids") == (PROMPT if call.visible.ids else None)
    assert fast == shown_and_recorded(chunks, call, as_json=True)


texts = st.text(max_size=5) | st.sampled_from([TRAP, '\\"', "\\u0041", "\x00\x1f", "ü", "\n\t"])
tokens = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-9000, 0, width=32)), min_size=1, max_size=3
)
deltas = texts.map(lambda text: {"content": text}) | texts.map(lambda text: {"reasoning": text})


@given(
    st.lists(st.builds(a_chunk, deltas, tokens), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_words_and_tokens_are_the_same_either_way(
    chunks: list[bytes], ids: bool, logprobs: bool
) -> None:
    check(chunks, return_token_ids=ids, logprobs=logprobs)


@pytest.mark.parametrize(
    "odd",
    [
        a_chunk({}, [(5, -1.0)]),
        a_chunk({"content": "a", "reasoning": "b"}, [(5, -1.0)]),
        a_chunk({"content": None}, [(5, -1.0)]),
        a_chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}, [(5, -1.0)]),
        a_chunk({"content": "a"}, [(5, -9999.0)]),
        a_chunk({"content": "a"}, [(1 << 40, -1.0)]),
        a_chunk({"content": "a"}, [], token_ids=[5]),
        a_chunk({"content": "a"}, [(5, -1.0)], token_ids=[5, 6]),
        a_chunk({"content": "a"}, [(5, -1.0)], token_ids=None),
        a_chunk({"content": "a"}, [(5, -1.0)], logprobs=None),
        a_chunk({"content": "a"}, [(5, -1.0)], finish_reason="stop"),
        a_chunk({"content": "a"}, [(5, -1.0)], note="more"),
        a_chunk({"content": "a"}, [(5, -1.0)], index=1),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b'"logprob":-1.0', b'"logprob":"a"'),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b'"logprob":-1.0,', b""),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b'"top_logprobs":[]', b'"top_logprobs":[1]'),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b'"a"', b'"\xff"'),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b'"a"', b'"\\ud800"'),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b'"a"', b'"\\x"'),
        a_chunk({"content": "a"}, [(5, -1.0)]).replace(b"null", b"nul"),
        a_chunk({"content": "a"}, [(5, -1.0)])[:-1],
        b'{"error":{"message":"the engine died","code":500}}',
        orjson.dumps({**HEAD, "choices": [], "usage": {"prompt_tokens": 3}}),
    ],
)
@pytest.mark.parametrize("tokens_are_shown", [True, False])
def test_any_other_chunk_is_read_as_json(odd: bytes, tokens_are_shown: bool) -> None:
    usual = [a_chunk({"content": text}, [(at, -at / 8)]) for at, text in enumerate("abc")]
    check([*usual, odd, *usual], return_token_ids=tokens_are_shown, logprobs=tokens_are_shown)


@pytest.mark.parametrize(
    "odd",
    [
        [([5], [-1.0, -2.0])],
        [([5, 6], [-1.0])],
        # As many of both in all: taken together they would be shifted by one.
        [([5, 6], [-1.0]), ([7], [-2.0, -3.0])],
        [([5], [-1.0, -2.0]), ([6, 7], [-3.0])],
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_log_probabilities_that_are_not_one_a_token_drop_all_tokens(
    odd: list[tuple[list[int], list[float]]], as_json: bool
) -> None:
    usual = a_chunk({"content": "a"}, [(4, -0.5)])
    chunks = [a_chunk({"content": "b"}, [(0, v) for v in values], token_ids=i) for i, values in odd]
    # Behind the push, so that no change of the version comes between them.
    chunks = [*[usual] * 6, *chunks, usual]
    _, (replies, _, _) = shown_and_recorded(chunks, a_call(), as_json=as_json)
    [reply] = replies
    assert (reply.discard_reason, len(reply.token_ids), len(reply.logprobs)) == ("no_tokens", 0, 0)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_missing_log_probability_drops_all_tokens(at: int) -> None:
    tokens = [(number, -9999.0 if number == at else -1.0) for number in range(3)]
    _, (replies, _, _) = shown_and_recorded(
        [a_chunk({"content": "a"}, tokens)], a_call(), as_json=True
    )
    assert [reply.discard_reason for reply in replies] == ["no_logprobs"]


@pytest.mark.parametrize(
    ("count", "versions"),
    [(0, []), (2, [(4, 2)]), (3, [(4, 3)]), (4, [(4, 3), (5, 1)]), (5, [(4, 3), (5, 2)])],
)
def test_a_reply_is_cut_with_its_versions(count: int, versions: list[tuple[int, int]]) -> None:
    reply = SampledCompletion()
    reply.add([1, 2, 3], [-1.0, -2.0, -3.0], 4)
    reply.add([4, 5], [-4.0, -5.0], 5)
    reply.truncate(count)
    assert reply.versions == versions
    assert reply.token_ids.tolist() == [1, 2, 3, 4, 5][:count]
    assert reply.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0][:count]


def test_few_chunks_are_kept_unread() -> None:
    stream = EngineStream(a_call(), lambda: 4)
    many = 3 * MOST_PENDING + 7
    stream.feed(sse.encode_event(the_first()))
    most = 0
    for at in range(many):
        [event] = stream.feed(sse.encode_event(a_chunk({"content": "a"}, [(at, -0.5)])))
        # The one after the first is read as JSON no more: it is passed on.
        assert isinstance(event, bytes)
        assert stream._token_chunks is not None
        most = max(most, len(stream._token_chunks.token_ids))
    assert most == MOST_PENDING
    [reply] = stream.completions()
    assert reply.token_ids.tolist() == list(range(many))
    assert reply.response["choices"][0]["message"] == {"role": "assistant", "content": "a" * many}


def test_a_head_that_holds_more_is_not_learnt() -> None:
    shown = a_call().visible
    usual = a_chunk({"content": "a"}, [(5, -1.0)])
    assert TokenChunkReader.learn(usual, shown) is not None
    for other in (
        b'{"usage":{"a":1},' + usual[1:],
        b'{"prompt_token_ids":[1],' + usual[1:],
        usual.replace(b'"index":0', b'"index":0,"finish_reason":"stop"'),
        b"[]",
        b"",
    ):
        assert TokenChunkReader.learn(other, shown) is None


def framed(*chunks: bytes) -> bytes:
    """As pieces of HTTP's chunked encoding."""
    events = map(sse.encode_event, chunks)
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def unframed(data: bytes) -> bytes:
    found = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        end = int(size, 16)
        assert rest[end : end + 2] == b"\r\n"
        found.append(rest[:end])
        data = rest[end + 2 :]
    return b"".join(found)


def from_the_wire(chunks: list[bytes], call: Call, together: int) -> tuple[bytes, Any, int]:
    """So many chunks come at once: what is shown, what is recorded, and how many pieces went on as
    they were."""
    version = 4
    stream = EngineStream(call, lambda: version)
    shown, passed = [], 0
    stream.feed(sse.encode_event(the_first()))
    for at in range(0, len(chunks), together):
        version = 5 if at > len(chunks) // 2 else 4
        data = framed(*chunks[at : at + together])
        frames = stream.pass_frames(data)
        if frames is not None:
            passed += 1
            shown.append(unframed(frames))
        else:
            for one in stream.feed(unframed(data)):
                shown.append(one if isinstance(one, bytes) else ChatStreamWriter().chunk(one))
    error = stream.error and stream.error.message
    return b"".join(shown), (stream.completions(), stream.tail, error), passed


def check_frames(chunks: list[bytes], *, together: int = 1, **asked: Any) -> int:
    call = a_call(**asked)
    shown, recorded, passed = from_the_wire(chunks, call, together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenChunkReader, "read_frames", lambda *_: None)
        assert (shown, recorded, 0) == from_the_wire(chunks, call, together)
    return passed


@given(
    st.lists(st.builds(a_chunk, deltas, tokens), max_size=6),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_pieces_of_the_wire_give_the_same_words_and_tokens(
    chunks: list[bytes], together: int, ids: bool, logprobs: bool
) -> None:
    check_frames(chunks, together=together, return_token_ids=ids, logprobs=logprobs)


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True, "logprobs": True}])
def test_pieces_of_one_token_go_on_without_being_read(asked: Json) -> None:
    chunks = [a_chunk({"content": f"{number}"}, [(number, -1.0)]) for number in range(200)]
    assert check_frames(chunks, **asked) == 200
    assert check_frames(chunks, together=3, **asked) == 67


GOOD = a_chunk({"content": "a"}, [(5, -1.0)])


@pytest.mark.parametrize(
    "wire",
    [
        framed(GOOD)[:-2],
        framed(GOOD)[1:],
        framed(GOOD) + b"0\r\n\r\n",
        framed(GOOD, GOOD.replace(b"null", b"nul")),
        framed(GOOD).replace(b'"a"', b'"aa"'),  # longer than it says
        framed(GOOD.replace(b'"a"', b'"\xff"')),
        framed(a_chunk({"content": "a"}, [(5, -1.0), (6, -1.0)])),
        framed(a_chunk({"content": "a"}, [(5, -1.0)], finish_reason="stop")),
        b"fffffffff\r\n" + framed(GOOD),
        b"x" + framed(GOOD),
        b"\r\n" + framed(GOOD),
        b"not\r\n" + sse.encode_event(GOOD) + b"\r\n",
    ],
)
def test_of_anything_but_whole_pieces_nothing_is_taken(wire: bytes) -> None:
    stream = EngineStream(a_call(), lambda: 4)
    stream.feed(sse.encode_event(the_first()) + sse.encode_event(GOOD))
    assert stream.pass_frames(framed(GOOD)) is not None
    assert stream.pass_frames(wire) is None
    [reply] = stream.completions()
    assert reply.token_ids.tolist() == [5, 5]

"""A vLLM's answers as bytes that are made before anybody asks.

The shapes are those of vLLM 0.32's chat completions. Only what differs from call to call (the
answer's id, the prompt's ids, the usage) is put in when a call comes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import orjson

from bench.proxy.calls import MODEL

_CREATED = 1_700_000_000
# Stands where the id of an answer comes, in as many bytes.
_ID = b"@@@@-the-id-of-the-answer-@@@@@@"
_END_TEXT = "<|im_end|>"
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_SSE_END = b"0\r\n\r\n"
# Replies whose bytes are kept, each in what it may be told with.
_KEPT = 512


class Sampled(Hashable, Protocol):
    """A reply: what each of its tokens reads as, the last one (which ends it) as nothing. Equal
    ones have the same bytes."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Told:
    """What a call asks to be told beside the text."""

    ids: bool = False
    logprobs: bool = False
    usage: bool = False


class PromptIds:
    """A prompt's token ids, and their JSON."""

    def __init__(self, ids: list[int]) -> None:
        self.count = len(ids)
        self.json = orjson.dumps(ids)


def json_response(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def answer_id(number: int) -> bytes:
    return b"%032x" % number


def whole(prompt: PromptIds, reply: Sampled, told: Told, number: int) -> bytes:
    """The response, headers and all, to call `number`."""
    usage = orjson.dumps(
        {**_usage(prompt.count, len(reply.ids)), "completion_tokens_details": None}
    )
    body = _whole_frame(reply, told.ids, told.logprobs) % (
        answer_id(number),
        usage,
        prompt.json if told.ids else b"null",
    )
    return json_response(body)


@lru_cache(maxsize=_KEPT)
def _whole_frame(reply: Sampled, ids: bool, logprobs: bool) -> bytes:
    message = {
        "role": "assistant",
        "content": reply.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": _entries(reply)} if logprobs else None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": reply.ids if ids else None,
        "routed_experts": None,
    }
    head = {"object": "chat.completion", "created": _CREATED, "model": MODEL, "choices": [choice]}
    inner = orjson.dumps({**head, "service_tier": None, "system_fingerprint": None})
    return (
        b'{"id":"chatcmpl-%b",'
        + inner[1:-1].replace(b"%", b"%%")
        + b',"usage":%b,"prompt_logprobs":null,"prompt_token_ids":%b,"prompt_text":null,'
        b'"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )


@dataclass(frozen=True)
class Stream:
    """One streamed answer: `pieces` are sent one after another, the first with the headers."""

    data: bytes
    ends: tuple[int, ...]

    @property
    def pieces(self) -> int:
        return len(self.ends)

    def piece(self, at: int) -> bytes:
        return self.data[self.ends[at - 1] if at else 0 : self.ends[at]]


def stream(prompt: PromptIds, reply: Sampled, told: Told, chunk_tokens: int, number: int) -> Stream:
    """The role and the first tokens are one piece, as an engine sends them at once.

    The last piece has what follows the last tokens: usage, if it is asked for, and `[DONE]`.
    """
    name = answer_id(number)
    frame = _stream_frame(reply, told.ids, told.logprobs, chunk_tokens)
    first = _http_chunk(_event(_first_chunk(prompt, told)))
    last = b""
    if told.usage:
        chunk = {**_stream_head, "choices": [], "usage": _usage(prompt.count, len(reply.ids))}
        last = _http_chunk(_event(orjson.dumps(chunk)))
    data = b"".join(
        (_SSE_HEAD, first, frame.data, last, _http_chunk(b"data: [DONE]\n\n"), _SSE_END)
    ).replace(_ID, name)
    shift = len(_SSE_HEAD) + len(first)
    return Stream(data, (*(end + shift for end in frame.ends[:-1]), len(data)))


_stream_head = {
    "id": f"chatcmpl-{_ID.decode()}",
    "object": "chat.completion.chunk",
    "created": _CREATED,
    "model": MODEL,
}


def _first_chunk(prompt: PromptIds, told: Told) -> bytes:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    start = orjson.dumps({**_stream_head, "choices": [choice]})
    return start[:-1] + b',"prompt_token_ids":' + (prompt.json if told.ids else b"null") + b"}"


@lru_cache(maxsize=_KEPT)
def _stream_frame(reply: Sampled, ids: bool, logprobs: bool, chunk_tokens: int) -> Stream:
    """What lies between the first chunk and the end."""
    entries = _entries(reply)
    chunks = []
    for start in range(0, len(reply.ids), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        last = start + chunk_tokens >= len(reply.ids)
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": "".join(reply.texts[part])},
            "logprobs": {"content": entries[part]} if logprobs else None,
            "finish_reason": "stop" if last else None,
            "token_ids": reply.ids[part] if ids else None,
        }
        if last:
            choice["stop_reason"] = None
        chunks.append(_http_chunk(_event(orjson.dumps({**_stream_head, "choices": [choice]}))))
    return Stream(b"".join(chunks), tuple(accumulate(map(len, chunks))))


@lru_cache(maxsize=_KEPT)
def _entries_of(reply: Sampled) -> tuple[dict[str, Any], ...]:
    texts = [*reply.texts[:-1], _END_TEXT]
    return tuple(
        {"token": text, "logprob": lp, "bytes": list(text.encode()), "top_logprobs": []}
        for text, lp in zip(texts, reply.logprobs, strict=True)
    )


def _entries(reply: Sampled) -> list[dict[str, Any]]:
    return list(_entries_of(reply))


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
    }


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)

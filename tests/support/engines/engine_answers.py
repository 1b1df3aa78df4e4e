"""An engine's answers to one call, whole and in chunks, in vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What the engine sampled; tool calls as (name, text of the arguments), or with an id too."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, ...]] = ()
    finish: str = ""
    hit: str | int | None = None  # the stop string or token
    prompt_tokens: int = 11
    completion_tokens: int = 7

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")

    @property
    def message(self) -> Json:
        """Canonical: as the store has it and as it must come back."""
        message: Json = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [tool_call(*call) for call in self.calls_with_ids()]
        return message

    def calls_with_ids(self) -> Iterator[tuple[str, str, str]]:
        for number, (name, arguments, *own_id) in enumerate(self.calls):
            yield (*own_id, f"chatcmpl-tool-{number}")[0], name, arguments

    @property
    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": None,
        }


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def whole(*said: Said) -> Json:
    choices = [
        {
            "index": index,
            "message": {"refusal": None, "reasoning": None, **one.message},
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.hit,
        }
        for index, one in enumerate(said)
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "engine",
        "choices": choices,
        "usage": said[0].usage,
    }


def chunk(
    delta: Json,
    *,
    index: int = 0,
    finish: str | None = None,
    hit: Any = None,
    logprobs: Sequence[Json] | None = None,
) -> Json:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "stop_reason": hit}
    if logprobs is not None:
        choice["logprobs"] = {"content": list(logprobs)}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def streamed(said: Said, *, size: int = 4, index: int = 0) -> tuple[list[Json], list[Json]]:
    """The chunks that go on, and those that end the stream. The last piece comes with the end."""
    deltas = [{"role": "assistant", "content": ""}, *_deltas(said, size)]
    *going_on, last = deltas
    if last.get("role"):
        going_on, last = deltas, {}
    ending = [
        chunk(last, index=index, finish=said.finish_reason, hit=said.hit),
        {"object": "chat.completion.chunk", "choices": [], "usage": said.usage},
    ]
    return [chunk(delta, index=index) for delta in going_on], ending


def _deltas(said: Said, size: int) -> Iterator[Json]:
    for piece in _pieces(said.reasoning, size):
        yield {"reasoning": piece}
    for piece in _pieces(said.content, size):
        yield {"content": piece}
    for number, (call_id, name, arguments) in enumerate(said.calls_with_ids()):
        head = {"index": number, "id": call_id, "type": "function"}
        yield {"tool_calls": [{**head, "function": {"name": name}}]}
        for piece in _pieces(arguments, size):
            yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}


def _pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def same_message(one: Json, other: Json) -> bool:
    """Canonical messages that are equal, but for how JSON arguments are spelled."""
    return _comparable(one) == _comparable(other)


def _comparable(message: Json) -> Json:
    calls = [
        (call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
    }


def _arguments(text: str) -> str:
    try:
        value = json.loads(text.strip() or "{}")
    except json.JSONDecodeError:
        return text
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else text


# Without lone surrogates, which JSON cannot carry.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
# As orjson reads and writes them: integers of at most 64 bits.
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=4)
spelled_objects = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    objects,
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)


def said(arguments: st.SearchStrategy[str]) -> st.SearchStrategy[Said]:
    calls = st.lists(
        st.tuples(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), arguments), max_size=3
    )
    return st.builds(Said, content=texts, reasoning=texts, calls=calls)

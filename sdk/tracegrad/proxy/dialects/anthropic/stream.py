"""A streamed answer as Anthropic's events.

    message_start, then for each block content_block_start, _delta ..., _stop,
    then message_delta (stop reason, usage), message_stop

One block is open at a time. Arguments of tool calls go out as the engine writes them, whatever
they are: a client that cannot read them says so. Text that comes while a tool call is being
written waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects.anthropic import response as output
from tracegrad.proxy.http.errors import ApiError

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class AnthropicStreamWriter:
    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks = _Blocks(output.signature(call))

    def begin(self, prompt_tokens: int | None) -> bytes:
        usage = output.usage_of({"prompt_tokens": prompt_tokens})
        return _event("message_start", message={**output.message_start(self._call), "usage": usage})

    def chunk(self, chunk: Json) -> bytes:
        return b"".join(self._delta(choice["delta"]) for choice in chunk["choices"])

    def end(self, chunks: Sequence[Json]) -> bytes:
        out = [self.chunk(chunk) for chunk in chunks]
        out.append(self._blocks.close())
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ending: Json = next((choice for choice in choices if choice.get("finish_reason")), {})
        reason, sequence = output.stop_reason(ending, self._blocks.arguments)
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
        out.append(
            _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=output.usage_of(usage),
            )
        )
        out.append(_event("message_stop"))
        return b"".join(out)

    def error(self, error: ApiError) -> bytes:
        return _event("error", error=output.error_object(error))

    def keepalive(self) -> bytes:
        """A ping may stand before message_start too: the vendor's clients skip it anywhere."""
        return _PING

    def _delta(self, delta: Json) -> bytes:
        out = []
        if self._call.visible.reasoning and (thought := delta.get("reasoning")):
            out.append(self._blocks.say("thinking", thought))
        if text := delta.get("content"):
            out.append(self._blocks.say("text", text))
        out += [self._blocks.call(piece) for piece in delta.get("tool_calls") or ()]
        return b"".join(out)


class _Blocks:
    """The content blocks of one message, opened and closed as the deltas ask for it."""

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._count = 0
        self._open: str | None = None  # the type of the open block, the last one
        self._held: list[tuple[str, str]] = []  # said while a tool call was open
        # By the engine's index of a tool call: the index of its block, and its arguments.
        self._of_tool: dict[int, int] = {}
        self._arguments: dict[int, list[str]] = {}

    @property
    def arguments(self) -> list[str]:
        """Of each tool call."""
        return ["".join(pieces) for pieces in self._arguments.values()]

    def say(self, kind: str, text: str) -> bytes:
        """Text or thought that goes on, or begins."""
        if self._open == "tool_use":
            self._held.append((kind, text))
            return b""
        out = b"" if self._open == kind else self._begin({"type": kind, kind: ""})
        return out + self._say(kind, text)

    def call(self, piece: Json) -> bytes:
        """A piece of a tool call: its id and name come with the first."""
        function = piece.get("function") or {}
        number, out = piece["index"], b""
        if number not in self._of_tool:
            head: Json = {"type": "tool_use", "id": piece.get("id") or "", "input": {}}
            out = self._begin({**head, "name": function.get("name") or ""})
            self._of_tool[number] = self._count - 1
            self._arguments[number] = []
        if arguments := function.get("arguments"):
            self._arguments[number].append(arguments)
            delta = {"type": "input_json_delta", "partial_json": arguments}
            out += _event("content_block_delta", index=self._of_tool[number], delta=delta)
        return out

    def close(self) -> bytes:
        """End the open block, and say what it held back."""
        out = self._stop()
        held, self._held = self._held, []
        for kind, text in held:
            out += self.say(kind, text)
        return out + self._stop()

    def _begin(self, block: Json) -> bytes:
        out = self.close()
        if block["type"] == "thinking":
            block["signature"] = ""
        self._open = block["type"]
        self._count += 1
        return out + _event("content_block_start", index=self._count - 1, content_block=block)

    def _say(self, kind: str, text: str) -> bytes:
        delta = {"type": f"{kind}_delta", kind: text}
        return _event("content_block_delta", index=self._count - 1, delta=delta)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        out, index = b"", self._count - 1
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            out = _event("content_block_delta", index=index, delta=delta)
        self._open = None
        return out + _event("content_block_stop", index=index)


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))

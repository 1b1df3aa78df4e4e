"""A streamed answer as Gemini's: server-sent events, or one JSON array sent piece by piece.

Each chunk is a response of its own. A function call is one part, whole, and comes at the end,
with the finish reason: so nobody can act on a call before its turn is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects.gemini import response as output
from tracegrad.proxy.http import sse as events
from tracegrad.proxy.http.errors import ApiError


class GeminiStreamWriter:
    def __init__(self, call: Call, *, array: bool) -> None:
        self._call = call
        self._array = array
        self._first = True
        # Function calls by the engine's indexes, those of the choice and of the call.
        self._calls: dict[int, dict[int, _FunctionCall]] = {}

    @property
    def content_type(self) -> str:
        kind = "application/json" if self._array else "text/event-stream"
        return f"{kind}; charset=utf-8"

    def begin(self, prompt_tokens: int | None) -> bytes:
        return b"[" if self._array else b""

    def chunk(self, chunk: Json) -> bytes:
        candidates = []
        for choice in chunk["choices"]:
            self._collect(choice)
            if (parts := output.text_parts(self._call, choice["delta"])) or choice.get("logprobs"):
                candidates.append(output.candidate(choice, parts))
        return self._send(output.response(self._call, candidates)) if candidates else b""

    def end(self, chunks: Sequence[Json]) -> bytes:
        usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        going_on = [choice for choice in choices if not choice.get("finish_reason")]
        ending = [self._last(choice) for choice in choices if choice.get("finish_reason")]
        out = self.chunk({"choices": going_on})
        out += self._send(output.response(self._call, ending, usage))
        return out + b"]" if self._array else out

    def error(self, error: ApiError) -> bytes:
        body = output.error_body(error)
        if self._array:
            return self._comma() + body + b"]"
        # Not as an event: Google's clients take an error in the midst of a stream as the line of
        # JSON that its servers send.
        return body + b"\n\n"

    def keepalive(self) -> bytes:
        """White space: some of Google's clients stop reading at a comment."""
        return b"\n"

    def _collect(self, choice: Json) -> None:
        calls = self._calls.setdefault(choice["index"], {})
        for piece in choice["delta"].get("tool_calls") or ():
            calls.setdefault(piece["index"], _FunctionCall()).add(piece)

    def _last(self, choice: Json) -> Json:
        """The candidate that ends a choice: what its last chunk says, and its calls."""
        self._collect(choice)
        calls = self._calls.pop(choice["index"]).values()
        parts = output.text_parts(self._call, choice["delta"])
        return output.candidate(choice, parts + [call.part() for call in calls])

    def _send(self, response: Json) -> bytes:
        body = orjson.dumps(response)
        return self._comma() + body if self._array else events.encode_event(_one_line(body))

    def _comma(self) -> bytes:
        first, self._first = self._first, False
        return b"" if first else b",\r\n"


def _one_line(body: bytes) -> bytes:
    """Google's clients take what Unicode calls a line's end for one, also inside a string."""
    for end, escaped in _LINE_ENDS:
        body = body.replace(end, escaped)
    return body


_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in ("\x85", "\u2028", "\u2029")]


class _FunctionCall:
    """One call, put together from its deltas."""

    def __init__(self) -> None:
        self._id = ""
        self._name = ""
        self._arguments: list[str] = []

    def add(self, piece: Json) -> None:
        function = piece.get("function") or {}
        self._id = piece.get("id") or self._id
        self._name += function.get("name") or ""
        self._arguments.append(function.get("arguments") or "")

    def part(self) -> Json:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return output.function_call(self._id, function)

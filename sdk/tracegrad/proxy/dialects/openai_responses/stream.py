"""A streamed response: the engine's chunks as events of the Responses API, in OpenAI's order.

    response.created, response.in_progress
    per item: output_item.added, [content_part.added,] deltas, done, [content_part.done,]
              output_item.done
    response.completed | response.incomplete | response.failed

One item grows at a time, as with OpenAI; simple clients rely on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tracegrad.events import Json
from tracegrad.proxy.dialects.base import Call
from tracegrad.proxy.dialects.openai_responses.item_streams import (
    CustomToolCallItemStream,
    FunctionCallItemStream,
    ItemStream,
    MessageItemStream,
    ReasoningItemStream,
)
from tracegrad.proxy.dialects.openai_responses.logprobs import TextLogprobs, entries_of
from tracegrad.proxy.dialects.openai_responses.response import (
    OutputItems,
    ResponseEnvelope,
    call_id_of,
    incomplete_reason,
)
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError

# Codes that clients act on when a response fails; all else is the server's fault.
_FAILURE_CODES = (
    CONTEXT_LENGTH_EXCEEDED,
    "rate_limit_exceeded",
    "insufficient_quota",
    "invalid_prompt",
)


class ResponsesStreamWriter:
    """The StreamWriter of one call."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._envelope = ResponseEnvelope(call)
        self._items = OutputItems(call)
        self._sequence = 0
        self._begun = False
        self._growing: ItemStream | None = None
        self._calls: dict[
            int, FunctionCallItemStream | CustomToolCallItemStream
        ] = {}  # by the engine's index
        self._output: list[Json] = []
        self._tokens = TextLogprobs()
        self._finish_reason: str | None = None
        self._usage: Any = None
        self._model: str | None = None

    def begin(self, prompt_tokens: int | None) -> bytes:
        """Empty if a keepalive has begun the stream already."""
        if self._begun:
            return b""
        self._begun = True
        response = self._envelope.response("in_progress")
        return self._encode(
            {"type": kind, "response": response}
            for kind in ("response.created", "response.in_progress")
        )

    def keepalive(self) -> bytes:
        """`response.in_progress` once more: Codex counts only events, so a comment would not
        keep it waiting, and accumulators take it any number of times after `created`."""
        if not self._begun:
            return self.begin(None)
        response = self._envelope.response("in_progress")
        return self._encode([{"type": "response.in_progress", "response": response}])

    def chunk(self, chunk: Json) -> bytes:
        """Raises ApiError when the engine goes back to a call that has ended."""
        events: list[Json] = []
        self._read(chunk, events)
        return self._encode(events)

    def end(self, chunks: Sequence[Json]) -> bytes:
        events: list[Json] = []
        for chunk in chunks:
            self._read(chunk, events)
        if self._growing is None and not self._output:
            # An answer that says nothing is an empty message, which a client can send back.
            self._message(events)
        cut = incomplete_reason(self._finish_reason) is not None
        self._close(events, "incomplete" if cut else "completed")
        response = self._envelope.ended(
            self._finish_reason, self._output, usage=self._usage, model=self._model
        )
        events.append({"type": f"response.{response['status']}", "response": response})
        return self.begin(None) + self._encode(events)

    def error(self, error: ApiError) -> bytes:
        """An `error` event, which OpenAI's clients raise, and `response.failed`.

        OpenAI documents the error's fields beside `type` and sends them inside `error`; both
        are there, as each is read by somebody.
        """
        code = error.code if error.code in _FAILURE_CODES else _code_of(error.status)
        detail = {"code": code, "message": error.message, "param": error.param}
        failure = {"code": code, "message": error.message}
        return self.begin(None) + self._encode(
            [
                {"type": "error", **detail, "error": {"type": error_type(error.status), **detail}},
                {
                    "type": "response.failed",
                    "response": self._envelope.response(
                        "failed", self._output, model=self._model, error=failure
                    ),
                },
            ]
        )

    def _read(self, chunk: Json, events: list[Json]) -> None:
        self._model = chunk.get("model") or self._model
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            if self._call.visible.logprobs:
                self._tokens.add(entries_of(choice))
            self._tell(choice.get("delta") or {}, events)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _tell(self, delta: Json, events: list[Json]) -> None:
        if thought := delta.get("reasoning"):
            self._tokens.take(thought)
            events.append(self._reasoning(events).add(thought))
        if text := delta.get("content"):
            events.append(self._message(events).add(text, self._tokens.take(text)))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            growing = self._called(call, function, events)
            if arguments := function.get("arguments"):
                events += growing.add(arguments)

    def _reasoning(self, events: list[Json]) -> ReasoningItemStream:
        if not isinstance(self._growing, ReasoningItemStream):
            self._open(ReasoningItemStream(self._items, self._next()), events)
        assert isinstance(self._growing, ReasoningItemStream)
        return self._growing

    def _message(self, events: list[Json]) -> MessageItemStream:
        if not isinstance(self._growing, MessageItemStream):
            self._open(MessageItemStream(self._items, self._next()), events)
        assert isinstance(self._growing, MessageItemStream)
        return self._growing

    def _called(
        self, call: Json, function: Json, events: list[Json]
    ) -> FunctionCallItemStream | CustomToolCallItemStream:
        index = call["index"]
        known = self._calls.get(index)
        if known is None:
            name = function.get("name") or ""
            kind = (
                CustomToolCallItemStream if self._items.is_custom(name) else FunctionCallItemStream
            )
            call_id = call_id_of(call, self._call.turn_id, index)
            known = self._calls[index] = kind(self._items, self._next(), call_id, name)
            self._open(known, events)
        elif known is not self._growing and function.get("arguments"):
            raise ApiError(
                502, "the engine went back to a tool call that had ended", kind="upstream_error"
            )
        return known

    def _next(self) -> int:
        """The position of an item that is to be opened."""
        return len(self._output) + (self._growing is not None)

    def _open(self, item: ItemStream, events: list[Json]) -> None:
        self._close(events, "completed")
        self._growing = item
        events += item.begin()

    def _close(self, events: list[Json], status: str) -> None:
        if self._growing is not None:
            last, item = self._growing.end(status)
            events += last
            self._output.append(item)
            self._growing = None

    def _encode(self, events: Iterable[Json]) -> bytes:
        out = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._sequence})
            self._sequence += 1
            out.append(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
        return b"".join(out)


def error_type(status: int) -> str:
    """OpenAI's type of an error with this HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _code_of(status: int) -> str:
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < 500 else "server_error"

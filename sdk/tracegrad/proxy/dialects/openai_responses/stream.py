"""A streamed response: the engine's chunks as events of the Responses API, in OpenAI's order.

    response.created, response.in_progress
    per item: output_item.added, [content_part.added,] deltas, done, [content_part.done,]
              output_item.done
    response.completed | response.incomplete | response.failed

One item grows at a time, as with OpenAI; simple clients rely on that.

Events are dictionaries without their sequence numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects.openai_responses.response import (
    OutputItems,
    ResponseEnvelope,
    TextLogprobs,
    call_id_of,
    entries_of,
    in_event,
    incomplete_reason,
    reasoning_part,
    text_part,
)
from tracegrad.proxy.dialects.openai_responses.tools import CustomInputReader
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, UpstreamError

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
        self._calls: dict[int, FunctionCallItemStream] = {}  # by the engine's index
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
            self._read_delta(choice.get("delta") or {}, events)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _read_delta(self, delta: Json, events: list[Json]) -> None:
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

    def _called(self, call: Json, function: Json, events: list[Json]) -> FunctionCallItemStream:
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
            raise UpstreamError("the engine went back to a tool call that had ended")
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


Events = list[Json]


class ItemStream(ABC):
    """An output item from its beginning to its end. `prefix` is that of its id, `kind` the name of
    the events that its text comes in."""

    prefix: str
    kind: str

    def __init__(self, items: OutputItems, position: int) -> None:
        self._items = items
        self._id = items.new_id(self.prefix)
        self._place = {"item_id": self._id, "output_index": position}
        self._text: list[str] = []

    @abstractmethod
    def begin(self) -> Events: ...

    @abstractmethod
    def end(self, status: str) -> tuple[Events, Json]:
        """The last events, and the item as it is for good."""

    def _text_event(self, change: str, **fields: Any) -> Json:
        return {"type": f"response.{self.kind}.{change}", **self._place, **fields}

    def _part_event(self, change: str, part: Json) -> Json:
        kind = f"response.content_part.{change}"
        return {"type": kind, **self._place, "content_index": 0, "part": part}

    def _item_event(self, change: str, item: Json) -> Json:
        kind, position = f"response.output_item.{change}", self._place["output_index"]
        return {"type": kind, "output_index": position, "item": item}


class ReasoningItemStream(ItemStream):
    prefix, kind = "rs", "reasoning_text"

    def begin(self) -> Events:
        item = self._items.reasoning(self._id, None, "in_progress")
        return [self._item_event("added", item), self._part_event("added", reasoning_part(""))]

    def add(self, text: str) -> Json:
        self._text.append(text)
        return self._text_event("delta", content_index=0, delta=text)

    def end(self, status: str) -> tuple[Events, Json]:
        text = "".join(self._text)
        item = self._items.reasoning(self._id, text, status)
        done = self._text_event("done", content_index=0, text=text)
        part = self._part_event("done", reasoning_part(text))
        return [done, part, self._item_event("done", item)], item


class MessageItemStream(ItemStream):
    prefix, kind = "msg", "output_text"

    def __init__(self, items: OutputItems, position: int) -> None:
        super().__init__(items, position)
        self._logprobs: list[Json] = []

    def begin(self) -> Events:
        item = self._items.message(self._id, [], "in_progress")
        return [self._item_event("added", item), self._part_event("added", text_part(""))]

    def add(self, text: str, logprobs: Sequence[Json]) -> Json:
        self._text.append(text)
        self._logprobs += logprobs
        return self._text_event("delta", content_index=0, delta=text, logprobs=in_event(logprobs))

    def end(self, status: str) -> tuple[Events, Json]:
        text, logprobs = "".join(self._text), in_event(self._logprobs)
        part = text_part(text, self._logprobs)
        item = self._items.message(self._id, [part], status)
        done = self._text_event("done", content_index=0, text=text, logprobs=logprobs)
        return [done, self._part_event("done", part), self._item_event("done", item)], item


class FunctionCallItemStream(ItemStream):
    prefix, kind, field = "fc", "function_call_arguments", "arguments"

    def __init__(self, items: OutputItems, position: int, call_id: str, name: str) -> None:
        super().__init__(items, position)
        self._call = (call_id, name)

    def begin(self) -> Events:
        item = self._items.call(self._id, *self._call, "", "in_progress")
        return [self._item_event("added", item)]

    def add(self, arguments: str) -> Events:
        self._text.append(arguments)
        return [self._text_event("delta", delta=arguments)]

    def end(self, status: str) -> tuple[Events, Json]:
        text = "".join(self._text)
        item = self._items.call(self._id, *self._call, text, status)
        return [
            self._text_event("done", **{self.field: text}),
            self._item_event("done", item),
        ], item


class CustomToolCallItemStream(FunctionCallItemStream):
    """A call of a custom tool: its input is read from the arguments as they come."""

    prefix, kind, field = "ctc", "custom_tool_call_input", "input"

    def __init__(self, items: OutputItems, position: int, call_id: str, name: str) -> None:
        super().__init__(items, position, call_id, name)
        self._reader = CustomInputReader()

    def add(self, arguments: str) -> Events:
        text = self._reader.feed(arguments)
        return super().add(text) if text else []

    def end(self, status: str) -> tuple[Events, Json]:
        rest = self._reader.finish()
        events = super().add(rest) if rest else []
        last, item = super().end(status)
        return [*events, *last], item

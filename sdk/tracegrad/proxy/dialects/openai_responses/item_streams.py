"""Output items of a streamed response while they grow, and the events that tell it.

Events are dictionaries without their sequence numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tracegrad.events import Json
from tracegrad.proxy.dialects.openai_responses import custom_tools as custom
from tracegrad.proxy.dialects.openai_responses.logprobs import in_event
from tracegrad.proxy.dialects.openai_responses.response import (
    OutputItems,
    reasoning_part,
    text_part,
)

Events = list[Json]


class ItemStream(Protocol):
    """An item from its beginning to its end."""

    def begin(self) -> Events: ...

    def end(self, status: str) -> tuple[Events, Json]:
        """The last events, and the item as it is for good."""
        ...


class ReasoningItemStream:
    def __init__(self, items: OutputItems, position: int) -> None:
        self._items = items
        self._id = items.new_id("rs")
        self._place = {"item_id": self._id, "output_index": position}
        self._text: list[str] = []

    def begin(self) -> Events:
        item = self._items.reasoning(self._id, None, "in_progress")
        return [
            _added(item, self._place),
            _part("added", self._place, reasoning_part("")),
        ]

    def add(self, text: str) -> Json:
        self._text.append(text)
        return {
            "type": "response.reasoning_text.delta",
            **self._place,
            "content_index": 0,
            "delta": text,
        }

    def end(self, status: str) -> tuple[Events, Json]:
        text = "".join(self._text)
        item = self._items.reasoning(self._id, text, status)
        done = {
            "type": "response.reasoning_text.done",
            **self._place,
            "content_index": 0,
            "text": text,
        }
        part = _part("done", self._place, reasoning_part(text))
        return [done, part, _done(item, self._place)], item


class MessageItemStream:
    def __init__(self, items: OutputItems, position: int) -> None:
        self._items = items
        self._id = items.new_id("msg")
        self._place = {"item_id": self._id, "output_index": position}
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def begin(self) -> Events:
        item = self._items.message(self._id, [], "in_progress")
        return [_added(item, self._place), _part("added", self._place, text_part(""))]

    def add(self, text: str, logprobs: Sequence[Json]) -> Json:
        self._text.append(text)
        self._logprobs += logprobs
        return {
            "type": "response.output_text.delta",
            **self._place,
            "content_index": 0,
            "delta": text,
            "logprobs": in_event(logprobs),
        }

    def end(self, status: str) -> tuple[Events, Json]:
        text = "".join(self._text)
        part = text_part(text, self._logprobs)
        item = self._items.message(self._id, [part], status)
        done = {
            "type": "response.output_text.done",
            **self._place,
            "content_index": 0,
            "text": text,
            "logprobs": in_event(self._logprobs),
        }
        return [done, _part("done", self._place, part), _done(item, self._place)], item


class FunctionCallItemStream:
    """A call of a function."""

    def __init__(self, items: OutputItems, position: int, call_id: str, name: str) -> None:
        self._items = items
        self._id = items.new_id("fc")
        self._call = (call_id, name)
        self._place = {"item_id": self._id, "output_index": position}
        self._arguments: list[str] = []

    def begin(self) -> Events:
        item = self._items.call(self._id, *self._call, "", "in_progress")
        return [_added(item, self._place)]

    def add(self, arguments: str) -> Events:
        self._arguments.append(arguments)
        event = {
            "type": "response.function_call_arguments.delta",
            **self._place,
            "delta": arguments,
        }
        return [event]

    def end(self, status: str) -> tuple[Events, Json]:
        arguments = "".join(self._arguments)
        item = self._items.call(self._id, *self._call, arguments, status)
        done = {
            "type": "response.function_call_arguments.done",
            **self._place,
            "arguments": arguments,
        }
        return [done, _done(item, self._place)], item


class CustomToolCallItemStream:
    """A call of a custom tool: its input is read from the arguments as they come."""

    def __init__(self, items: OutputItems, position: int, call_id: str, name: str) -> None:
        self._items = items
        self._id = items.new_id("ctc")
        self._call = (call_id, name)
        self._place = {"item_id": self._id, "output_index": position}
        self._reader = custom.CustomInputReader()
        self._input: list[str] = []

    def begin(self) -> Events:
        return [_added(self._items.call(self._id, *self._call, "", "in_progress"), self._place)]

    def add(self, arguments: str) -> Events:
        return self._tell(self._reader.feed(arguments))

    def end(self, status: str) -> tuple[Events, Json]:
        rest = self._tell(self._reader.finish())
        text = "".join(self._input)
        item = self._items.call(self._id, *self._call, text, status)
        done = {"type": "response.custom_tool_call_input.done", **self._place, "input": text}
        return [*rest, done, _done(item, self._place)], item

    def _tell(self, text: str) -> Events:
        if not text:
            return []
        self._input.append(text)
        return [{"type": "response.custom_tool_call_input.delta", **self._place, "delta": text}]


def _added(item: Json, place: Json) -> Json:
    return {
        "type": "response.output_item.added",
        "output_index": place["output_index"],
        "item": item,
    }


def _done(item: Json, place: Json) -> Json:
    return {
        "type": "response.output_item.done",
        "output_index": place["output_index"],
        "item": item,
    }


def _part(change: str, place: Json, part: Json) -> Json:
    return {"type": f"response.content_part.{change}", **place, "content_index": 0, "part": part}

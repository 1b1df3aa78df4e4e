"""The messages of a turn as blocks of a page, and how much of them a page has room for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from tracegrad.inspect.display_text import printable
from tracegrad.inspect.transcript import Message, RepeatedMessages, ToolCall
from tracegrad.jsonutil import text_or_json

# Of more messages of a turn the first and the last are shown, so many of each.
FIRST_AND_LAST = 100
# Characters of a text that are shown at first, and at all.
SHORT, MOST_CHARACTERS = 1_200, 40_000
_SHORT_BY_ROLE = {"system": 300, "developer": 300, "tool": 700}
# What an element costs beside its text.
_MARKUP = 300

_KINDS = {"system": "system", "developer": "system", "user": "user", "prompt": "user",
          "tool": "tool", "assistant": "assistant", "reply": "assistant"}  # fmt: skip


class ShownText(NamedTuple):
    """`head` is shown; `whole` behind a click, empty where `head` is all. `left`: characters that
    are not shown at all."""

    head: str
    whole: str
    left: int


class ShownCall(NamedTuple):
    name: str
    arguments: list[tuple[str, ShownText]]  # by name; one without a name: what is no JSON object
    more: int  # arguments that there is no room for


class ShownMessage(NamedTuple):
    """A block of the conversation. `title`: of a tool's result, the tool."""

    role: str
    kind: Literal["system", "user", "tool", "assistant", "other"]
    title: str
    thoughts: ShownText | None
    text: ShownText | None
    calls: list[ShownCall]
    more_calls: int  # that there is no room for


class LeftOut(NamedTuple):
    """So many messages in a row that there is no room for."""

    left_out: int


class Room:
    """For the texts of one turn, in characters."""

    def __init__(self, characters: int) -> None:
        self.characters = characters
        self.used = 0

    def is_full(self) -> bool:
        return self.used >= self.characters

    def take(self, text: str, short: int) -> ShownText:
        """Its beginning always; behind a click what there is room for."""
        most = max(short, min(MOST_CHARACTERS, self.characters - self.used))
        shown = shown_text(text, short, most)
        self.used += len(shown.head) + len(shown.whole) + _MARKUP
        return shown


def shown_text(text: str, short: int, most: int = MOST_CHARACTERS) -> ShownText:
    kept = printable(text[:most]).rstrip("\n")
    left = max(0, len(text) - most)
    if len(kept) <= short + short // 4 and not left:
        return ShownText(kept, "", 0)
    return ShownText(kept[:short].rstrip() + " …", kept, left)


def shown_news(
    news: Sequence[Message | RepeatedMessages], room: Room
) -> list[ShownMessage | RepeatedMessages | LeftOut]:
    """The first and the last of very many, as far as there is room; how many the others are."""
    found: list[ShownMessage | RepeatedMessages | LeftOut] = []
    left_out = 0
    for place, each in enumerate(news):
        is_between = FIRST_AND_LAST <= place < len(news) - FIRST_AND_LAST
        if is_between or room.is_full():
            left_out += each.messages if isinstance(each, RepeatedMessages) else 1
            continue
        if left_out:
            found.append(LeftOut(left_out))
            left_out = 0
        found.append(each if isinstance(each, RepeatedMessages) else shown_message(each, room))
    if left_out:
        found.append(LeftOut(left_out))
    return found


def shown_message(message: Message, room: Room) -> ShownMessage:
    short = _SHORT_BY_ROLE.get(message.role, SHORT)
    empty = not (message.text or message.calls or message.reasoning)
    thoughts = room.take(message.reasoning, SHORT) if message.reasoning else None
    text = room.take(message.text, short) if message.text or empty else None
    calls = _calls(message.calls, room)
    return ShownMessage(
        "assistant" if message.role == "reply" else message.role,
        _KINDS.get(message.role, "other"),  # type: ignore[arg-type]
        message.answers,
        thoughts,
        text,
        calls,
        len(message.calls) - len(calls),
    )


def _calls(calls: Iterable[ToolCall], room: Room) -> list[ShownCall]:
    found: list[ShownCall] = []
    for call in calls:
        if room.is_full():
            break
        room.used += _MARKUP
        arguments = _arguments(call.arguments)
        shown: list[tuple[str, ShownText]] = []
        for name, value in arguments:
            if shown and room.is_full():
                break
            shown.append((name, room.take(value, SHORT)))
        found.append(ShownCall(call.name, shown, len(arguments) - len(shown)))
    return found


def _arguments(text: str) -> list[tuple[str, str]]:
    """Of a call's JSON object each value by its name; of all else the text without a name."""
    try:
        found: Any = json.loads(text)
        if isinstance(found, dict):
            return [(name, text_or_json(value)) for name, value in found.items()]
    except (ValueError, RecursionError):  # a model may write brackets without end
        pass
    return [("", text)]

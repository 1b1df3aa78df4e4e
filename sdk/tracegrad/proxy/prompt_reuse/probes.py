"""Stand-ins for what was said, to see where a template puts it.

A probe is a message with every text replaced by a mark that occurs nowhere else. Each place has a
mark of its own, which shows whether the template shows the place at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad.events import Json


@dataclass(frozen=True, slots=True)
class PlaceholderText:
    """Letters and digits only: no template trims, quotes or splits them. `length` characters."""

    salt: str
    length: int

    def __call__(self, number: int) -> str:
        return f"{self.salt}{number:04d}".ljust(self.length, "z")


@dataclass(slots=True)
class ReplyProbe:
    """A reply in marks: which mark stands for its content, its reasoning, its arguments.

    A reply without any text gets a mark for its content, `stand_in` says so.
    """

    message: Json
    content: str | None = None
    reasoning: str | None = None
    arguments: list[str] = field(default_factory=list)
    stand_in: bool = False

    @property
    def placeholders(self) -> list[str]:
        return [mark for mark in (self.content, self.reasoning, *self.arguments) if mark]


def unused_salt(texts: Iterable[str]) -> str:
    """A word that is in none of `texts`."""
    texts = list(texts)
    number = 0
    while any(f"qx{number}v" in text for text in texts):
        number += 1
    return f"qx{number}v"


def probe_reply(reply: Json, mark: PlaceholderText) -> ReplyProbe:
    """`reply` is a message as the template gets it (`messages.engine_message`)."""
    probe = ReplyProbe({**reply})
    # Numbered 0, 1, then one for each string among the arguments, whatever is there: the same
    # place has the same number in every probe of a reply.
    if _has_text(reply.get("content")):
        probe.content = mark(0)
    if reply.get("reasoning"):
        probe.reasoning = mark(1)
        probe.message["reasoning"] = probe.message["reasoning_content"] = probe.reasoning
    if calls := reply.get("tool_calls"):
        probe.message["tool_calls"] = [_call(call, probe.arguments, mark) for call in calls]
    if not probe.placeholders:
        probe.content, probe.stand_in = mark(0), True
    if probe.content is not None:
        probe.message["content"] = _as(reply.get("content"), probe.content)
    return probe


def probe_new_messages(messages: Sequence[Json], mark: PlaceholderText) -> list[Json]:
    """The messages after the reply, their contents replaced."""
    return [
        {**message, "content": _as(message.get("content"), mark(number))}
        for number, message in enumerate(messages)
    ]


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(part.get("text") for part in content)
    return bool(content)


def _as(content: Any, text: str) -> str | list[Json]:
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def _call(call: Json, used: list[str], mark: PlaceholderText) -> Json:
    def replace(_: str) -> str:
        used.append(mark(2 + len(used)))
        return used[-1]

    function = call["function"]
    return {**call, "function": {**function, "arguments": _mapped(function["arguments"], replace)}}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value

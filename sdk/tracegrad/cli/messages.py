"""What was said in a turn, read from its recorded request and response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad.proxy.dialects.registry import call_of
from tracegrad.records import Turn
from tracegrad.store.packing import dump_json


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class News:
    """A turn's messages without the `known` ones that turn `of_turn` had or answered."""

    messages: list[Message]
    known: int
    of_turn: int | None


def news_of(index: int, turns: Sequence[Turn]) -> News:
    """Compared with the turn's parent; a fork with the turn that shares most messages."""
    mine = _raw_messages(turns[index])
    call = call_of(turns[index])
    if call is not None and call.previous is not None:
        # The client sent what is new, and named the turn that it follows.
        named = [number for number in range(index) if turns[number].turn_id == call.previous]
        before = len(_raw_messages(turns[named[0]])) + 1 if named else 0
        return News([_message(raw) for raw in mine], before, named[0] if named else None)
    known, of_turn = 0, None
    for earlier in range(index):
        if turns[index].parent_id not in (None, turns[earlier].turn_id):
            continue
        shared = _shared(mine, turns[earlier])
        if shared and shared >= known:
            known, of_turn = shared, earlier
    return News([_message(raw) for raw in mine[known:]], known, of_turn)


def reply_of(turn: Turn) -> Message | None:
    choices = (turn.response or {}).get("choices") or []
    if not choices or not isinstance(choices[0], Mapping):
        return None
    raw = choices[0].get("message")
    return _message({**raw, "role": "reply"}) if isinstance(raw, Mapping) else None


def _raw_messages(turn: Turn) -> list[Mapping[str, Any]]:
    """In canonical form, whatever dialect the agent speaks."""
    call = call_of(turn)
    if call is None:
        return []
    if call.messages:
        return list(call.messages)
    return [{"role": "prompt", "content": call.body.get("prompt")}]


def _shared(mine: Sequence[Mapping[str, Any]], turn: Turn) -> int:
    """How many of `mine` the turn begins with, its reply among them."""
    theirs = _raw_messages(turn)
    shared = 0
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return shared
        shared += 1
    # Clients send a reply back in their own spelling: its place and role must do.
    if shared == len(theirs) and len(mine) > shared and mine[shared].get("role") == "assistant":
        shared += 1
    return shared


def _message(raw: Mapping[str, Any]) -> Message:
    role = str(raw.get("role") or "?")
    calls = []
    for call in raw.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            calls.append(Call(str(function.get("name")), _as_text(function.get("arguments"))))
    reasoning = raw.get("reasoning") or raw.get("reasoning_content") or ""
    return Message(role, _as_text(raw.get("content")), _as_text(reasoning), tuple(calls))


def _as_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return dump_json(content)


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
    return f"[{kind}]"

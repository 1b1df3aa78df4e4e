"""The messages of a rollout's turns, read from their recorded requests and responses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from humanize import naturalsize

from tracegrad.chat.call import Call
from tracegrad.events import Json, Turn
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.dialects.history import recorded_call, recorded_reply
from tracegrad.proxy.dialects.registry import call_of
from tracegrad.proxy.prompt_reuse.conversation_hash import arguments_value
from tracegrad.turn_tree import common_prefix

_DATA_URL = re.compile(r"data:([\w.+/-]*+)[^,]*+,")

# Messages of each of two turns that are compared with each other, beyond how these begin and end.
_MOST_COMPARED = 200


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`answers` is the name of the tool whose result it is, where that is known."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""


@dataclass(frozen=True, slots=True)
class RepeatedMessages:
    """So many messages in a row that turn `of_turn` has too."""

    messages: int
    of_turn: int


class Transcript:
    """Of the turns of one rollout, in order of capture; turns are named by their index."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self._number = {turn.turn_id: number for number, turn in enumerate(turns)}
        self._calls: dict[int, Call | None] = {}
        self._whole: dict[int, list[Json]] = {}
        self._known: dict[int, list[str]] = {}

    def parent(self, index: int) -> int | None:
        """The turn that it continues, if that is among the turns."""
        return self._number.get(self.turns[index].parent_id or "")

    def parent_tokens(self, index: int) -> int:
        """So many of its prompt's tokens are its parent's prompt and reply."""
        if (parent := self.parent(index)) is None:
            return 0
        turn = self.turns[parent]
        return len(turn.prompt_token_ids) + len(turn.completion_token_ids)

    def call(self, index: int) -> Call | None:
        """As the client made it; None without a request that this version reads."""
        if index not in self._calls:
            self._calls[index] = call_of(self.turns[index])
        return self._calls[index]

    def all_messages(self, index: int) -> list[Json]:
        """All messages in canonical form, also those that the client left out; [] without any."""
        if index not in self._whole:
            call = recorded_call(self.turns[index], self._find)
            self._whole[index] = self.sent_messages(index) if call is None else list(call.messages)
        return self._whole[index]

    def sent_messages(self, index: int) -> list[Json]:
        """The messages that the client sent, in canonical form, whatever dialect it speaks."""
        call = self.call(index)
        if call is None:
            request = self.turns[index].request or {}
            found = request.get("messages")
            return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
        if call.messages:
            return list(call.messages)
        return [{"role": "prompt", "content": call.body.get("prompt")}]

    def reply(self, index: int) -> Message | None:
        raw = recorded_reply(self.turns[index])
        return self.message({**raw, "role": "reply"}) if isinstance(raw, Mapping) else None

    def messages(self, index: int) -> list[Message]:
        return [self.message(raw) for raw in self.all_messages(index)]

    def new_messages(self, index: int) -> list[Message | RepeatedMessages]:
        """What is new compared with the turn's parent; a fork's with the closest turn."""
        mine = self.sent_messages(index)
        call = self.call(index)
        if call is not None and call.previous is not None:
            # The client sent what is new, and named the turn that it follows.
            named = self._number.get(call.previous)
            before = (
                [RepeatedMessages(len(self.all_messages(named)) + 1, named)]
                if named is not None
                else []
            )
            return [*before, *map(self.message, mine)]
        parent = self.parent(index)
        earlier = parent if parent is not None else self.closest_turn(index)
        if earlier is None:
            return [self.message(raw) for raw in mine]
        theirs, keys = self._keys(earlier), [_key(raw) for raw in mine]
        at = len(theirs) - 1
        replied = parent is not None and recorded_reply(self.turns[parent]) is not None
        if replied and at < len(mine) and _is_reply(mine[at]):
            keys[at] = theirs[at]  # continued: however the client wrote it down
        return self._without(mine, keys, theirs, earlier)

    def _without(
        self, mine: Sequence[Json], keys: Sequence[str], theirs: Sequence[str], earlier: int
    ) -> list[Message | RepeatedMessages]:
        news: list[Message | RepeatedMessages] = []
        at = 0
        for start, size in _repeated(theirs, keys):
            news += map(self.message, mine[at:start])
            news.append(RepeatedMessages(size, earlier))
            at = start + size
        return [*news, *map(self.message, mine[at:])]

    def closest_turn(self, index: int) -> int | None:
        """The earlier turn whose messages and reply this one has most of, from the first on; of
        equals one that it has all of, then the latest. None: not even the first is the same."""
        mine = [_key(raw) for raw in self.all_messages(index)]
        best, most = None, (0, False)
        for earlier in range(index):
            theirs = self._keys(earlier)
            shared = common_prefix(mine, theirs)
            if shared and (shared, shared == len(theirs)) >= most:
                best, most = earlier, (shared, shared == len(theirs))
        return best

    def _keys(self, index: int) -> list[str]:
        """Of all messages of a turn and its reply."""
        if index not in self._known:
            reply = recorded_reply(self.turns[index])
            messages = [
                *self.all_messages(index),
                *([{**reply, "role": "assistant"}] if reply else []),
            ]
            self._known[index] = [_key(raw) for raw in messages]
        return self._known[index]

    def tools(self, index: int) -> list[str]:
        """The names of the tools that the model was offered."""
        call = self.call(index)
        offered = (call.body.get("tools") if call is not None else None) or []
        functions = [tool.get("function") for tool in offered if isinstance(tool, dict)]
        return [str(each.get("name")) for each in functions if isinstance(each, dict)]

    def _find(self, turn_id: str) -> Turn | None:
        number = self._number.get(turn_id)
        return self.turns[number] if number is not None else None

    @cached_property
    def _called(self) -> dict[str, str]:
        """The name of the tool behind the id of each call."""
        replies = [recorded_reply(turn) for turn in self.turns]
        sent = [raw for index in range(len(self.turns)) for raw in self.sent_messages(index)]
        found: dict[str, str] = {}
        for raw in [*replies, *sent]:
            calls = raw.get("tool_calls") if isinstance(raw, Mapping) else None
            for call in calls if isinstance(calls, list) else []:
                function = call.get("function") if isinstance(call, Mapping) else None
                if isinstance(function, Mapping) and call.get("id"):
                    found[str(call["id"])] = str(function.get("name"))
        return found

    def message(self, raw: Mapping[str, Any]) -> Message:
        role = str(raw.get("role") or "?")
        calls = []
        for call in raw.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                arguments = as_text(function.get("arguments"))
                calls.append(ToolCall(str(function.get("name")), arguments))
        reasoning = raw.get("reasoning") or raw.get("reasoning_content") or ""
        answered = str(raw.get("tool_call_id") or "") if role == "tool" else ""
        return Message(
            role,
            as_text(raw.get("content")),
            as_text(reasoning),
            tuple(calls),
            self._called.get(answered, str(raw.get("name") or "") if role == "tool" else ""),
        )


def _repeated(theirs: Sequence[str], mine: Sequence[str]) -> list[tuple[int, int]]:
    """The runs of `mine` that are in `theirs` too and in the same order, each as its start and
    length. What both begin with is one run; of what remains, where it is long, what `theirs` ends
    with is another one, and between the two only so many are compared: equal messages by the
    thousand take the square of their number."""
    same = common_prefix(theirs, mine)
    theirs, rest = theirs[same:], mine[same:]
    runs = [(0, same)]
    ending = _ending(theirs, rest) if max(len(theirs), len(rest)) > _MOST_COMPARED else (0, 0)
    start, size = ending
    between = rest[:start] if size else rest
    theirs = theirs[: len(theirs) - size][-_MOST_COMPARED:]
    matcher = SequenceMatcher(None, theirs, between[:_MOST_COMPARED], autojunk=False)
    runs += [(same + block.b, block.size) for block in matcher.get_matching_blocks()]
    runs.append((same + start, size))
    return _joined(runs)


def _ending(theirs: Sequence[str], mine: Sequence[str]) -> tuple[int, int]:
    """The run of `mine` that `theirs` ends with, as its start and length; its last is the last
    that equals the last of `theirs`."""
    end = next((n for n in range(len(mine), 0, -1) if theirs and mine[n - 1] == theirs[-1]), 0)
    size = common_prefix(theirs[::-1], mine[:end][::-1])
    return end - size, size


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without empty ones; such as follow on each other as one."""
    found: list[tuple[int, int]] = []
    for start, size in runs:
        if found and size and found[-1][0] + found[-1][1] == start:
            found[-1] = (found[-1][0], found[-1][1] + size)
        elif size:
            found.append((start, size))
    return found


def _is_reply(raw: Json) -> bool:
    return raw.get("role") == "assistant"


def _key(raw: Json) -> str:
    """Equal for messages that say the same; clients send replies back in their own spelling,
    without the text beside calls, and with other ids."""
    if not _is_reply(raw):
        return dump_json({name: value for name, value in raw.items() if name != "tool_call_id"})
    calls = raw.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dump_json(as_text(raw.get("content")).strip())
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    called = [function for function in functions if isinstance(function, dict)]
    return dump_json([[f.get("name"), arguments_value(f.get("arguments"))] for f in called])


def as_text(content: Any) -> str:
    """A content as text; what is no text is named."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return dump_json(content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return "[part]"
    if isinstance(part.get("text"), str):
        return str(part["text"])
    kind = str(part.get("type", "part"))
    inner = part.get(kind)
    url = inner.get("url") if isinstance(inner, Mapping) else inner
    return f"[{kind.removesuffix('_url')}{_source(url)}]"


def _source(url: Any) -> str:
    """Where a picture comes from, or what kind and how large it is."""
    if not isinstance(url, str):
        return ""
    data = _DATA_URL.match(url)
    if data is None:
        return f": {url}" if len(url) <= 100 else f": {url[:100]}…"
    return f": {data[1] or 'data'}, {naturalsize((len(url) - data.end()) * 3 // 4)}"

"""The conversations of a rollout, as chat messages that chat templates take.

A turn continues an earlier one in text where it begins with that turn's messages and then with
its reply, in the client's spelling. In conversations the reply is as the model gave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad.events import Json, Turn
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.dialects.history import recorded_call, recorded_reply
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.chat_conversations import imported_messages
from tracegrad.transfer.layouts import ReasonCounter


class NoChatMessages(Exception):
    """Why a turn has no chat messages: "no_text", "media", "tool_calls"."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatTurn:
    """One turn: its prompt, the tools that were offered, and the model's reply."""

    turn: Turn
    prompt: list[Json]
    tools: list[Any]
    reply: Json

    @property
    def asked(self) -> tuple[list[Json], list[Any]]:
        """Equal for answers to the same words with the same tools."""
        return self.prompt, self.tools

    @property
    def tools_text(self) -> str | None:
        """As JSON text: tools differ in their fields, which columns do not."""
        return dump_json(self.tools) if self.tools else None


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """A path of turns. `replies` are the places of its turns' replies in `messages`."""

    turns: tuple[ChatTurn, ...]
    messages: list[Json]
    replies: frozenset[int]

    @property
    def all_replies_sampled(self) -> bool:
        """Whether every reply in it is one of its turns'."""
        return all(
            place in self.replies
            for place, message in enumerate(self.messages)
            if message["role"] == "assistant"
        )


def chat_turns(copy: RolloutRecord, left_out: ReasonCounter) -> list[ChatTurn]:
    """The turns that can be written as messages; the others are counted."""
    by_id = {turn.turn_id: turn for turn in copy.turns}
    found = []
    for turn in copy.turns:
        try:
            found.append(_chat_turn(turn, by_id))
        except NoChatMessages as reason:
            left_out[f"turns: {reason}"] += 1
    return found


def conversations(turns: Sequence[ChatTurn]) -> list[ChatConversation]:
    """One for each turn that no later one continues."""
    before = {id(one): _continued(one, turns[:index]) for index, one in enumerate(turns)}
    inner = {id(earlier) for earlier in before.values() if earlier is not None}
    found = []
    for leaf in turns:
        if id(leaf) in inner:
            continue
        path = [leaf]
        while (earlier := before[id(path[-1])]) is not None:
            path.append(earlier)
        found.append(_conversation(path[::-1]))
    return found


def message_of(raw: Json) -> Json:
    """With the fields that chat templates know. Raises NoChatMessages."""
    message: Json = {"role": raw.get("role"), "content": _text(raw.get("content"))}
    if reasoning := raw.get("reasoning_content") or raw.get("reasoning"):
        message["reasoning_content"] = _text(reasoning)
    if calls := raw.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    for field in ("tool_call_id", "name"):
        if isinstance(raw.get(field), str):
            message[field] = raw[field]
    return message


def _chat_turn(turn: Turn, by_id: dict[str, Turn]) -> ChatTurn:
    call = recorded_call(turn, by_id.get)
    reply = recorded_reply(turn)
    if call is None or not call.messages or reply is None:
        raise NoChatMessages("no_text")
    return ChatTurn(
        turn,
        [message_of(message) for message in call.messages],
        call.body.get("tools") or [],
        message_of({**reply, "role": "assistant"}),
    )


def _continued(one: ChatTurn, earlier: Sequence[ChatTurn]) -> ChatTurn | None:
    """The longest, the latest of equals."""
    continued = (
        other
        for other in reversed(earlier)
        if len(one.prompt) > (length := len(other.prompt))
        and _same_reply(one.prompt[length], other.reply)
        and one.prompt[:length] == other.prompt
    )
    return max(continued, key=lambda other: len(other.prompt), default=None)


def _same_reply(echo: Json, reply: Json) -> bool:
    """Clients send replies back stripped, without reasoning, arguments spelled differently."""
    return (
        echo["role"] == "assistant"
        and (echo["content"] or "").strip() == (reply["content"] or "").strip()
        and _names(echo) == _names(reply)
    )


def _names(message: Json) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def _conversation(path: Sequence[ChatTurn]) -> ChatConversation:
    leaf = path[-1]
    messages = [*leaf.prompt, leaf.reply]
    for one in path:
        messages[len(one.prompt)] = one.reply
    return ChatConversation(tuple(path), messages, frozenset(len(one.prompt) for one in path))


def _call(call: Any) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NoChatMessages("tool_calls")
    arguments = function.get("arguments")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else dump_json(arguments or {}),
        },
    }


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            raise NoChatMessages("media")
        parts.append(text)
    return "\n".join(parts)


def whole_conversations(
    copies: Sequence[RolloutRecord], left_out: ReasonCounter
) -> Iterator[ChatConversation]:
    """Those whose replies are all their turns', each in one conversation.

    Left out, counted by turns: conversations with replies that the agent brought along
    ("foreign_reply"), and those that share a reply with an earlier one ("shared_reply"), which
    would be learned twice. Imported conversations are all the teacher's.
    """
    yielded: set[str] = set()
    found = (each for copy in copies for each in conversations(chat_turns(copy, left_out)))
    for conversation in found:
        ids = {each.turn.turn_id for each in conversation.turns}
        new = len(ids - yielded)
        if ids & yielded:
            left_out["turns: shared_reply"] += new
        elif not (
            conversation.all_replies_sampled or imported_messages(conversation.turns[0].turn)
        ):
            left_out["turns: foreign_reply"] += new
        else:
            yield conversation
        yielded |= ids

"""Which recorded turn a conversation continues, by its messages.

A conversation has a key at each of its positions: a rolling hash of its messages so far, and of
the tools and template arguments. A recorded turn is filed under the key of its messages and its
reply; the longest position of a new conversation whose key is filed gives the turn it continues.
Replies are hashed tolerantly, since clients write them down again: by the ids of their tool
calls where they have any, otherwise by their trimmed text, and never by their reasoning. Whether
a reply really came back as it was is then decided by `reply_difference`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import content_text, has_media, without_billing_line
from tracegrad.events import Json
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork

# Integers beyond this are not exact in JavaScript, whose clients print them otherwise.
_EXACT = 2**53


class HashedConversation:
    """Some messages, by what it takes to find the turn that they continue.

    `replies` are the positions of the model's own. `frame` is the key of tools and template
    arguments (`messages.RenderOptions.key`).
    """

    __slots__ = ("_marks", "_unmarked", "frame", "replies")

    def __init__(
        self,
        frame: bytes,
        replies: tuple[int, ...],
        marks: tuple[bytes, ...],
        unmarked: Sequence[Json] = (),
    ) -> None:
        """`unmarked` are the messages after those that have their `marks`."""
        self.frame = frame
        self.replies = replies
        self._marks = marks
        self._unmarked = unmarked

    def __len__(self) -> int:
        return len(self._marks) + len(self._unmarked)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HashedConversation):
            return NotImplemented
        return (self.frame, self.replies, self.prefix_hashes) == (
            other.frame,
            other.replies,
            other.prefix_hashes,
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def prefix_hashes(self) -> tuple[bytes, ...]:
        """`marks[i]` stands for the first `i + 1` messages, 16 bytes.

        Made when somebody asks: what has no reply continues nothing, and a call's first words
        need not wait until a long prompt is hashed.
        """
        if self._unmarked:
            marks = list(self._marks)
            for message in self._unmarked:
                marks.append(_mark(marks[-1] if marks else b"", message))
            self._marks, self._unmarked = tuple(marks), ()
        return self._marks

    @property
    def key(self) -> bytes:
        """What a turn is filed under whose reply is the last of the messages."""
        return self.frame + self.prefix_hashes[-1]

    def reply_keys(self) -> Iterator[tuple[int, bytes]]:
        """The position of each reply and the key at it, the last reply first."""
        for position in reversed(self.replies):
            yield position, self.frame + self.prefix_hashes[position]

    def with_reply(self, reply: Json) -> HashedConversation:
        """With the reply to it."""
        mark = _mark(self.prefix_hashes[-1] if self.prefix_hashes else b"", reply)
        return HashedConversation(
            self.frame, (*self.replies, len(self)), (*self.prefix_hashes, mark)
        )


def hash_conversation(messages: Sequence[Json], frame: bytes) -> HashedConversation:
    """`messages` are canonical: roles, contents, tool calls as in a chat completion request."""
    replies = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    return HashedConversation(frame, tuple(replies), (), messages)


def with_recorded_replies(
    incoming: Sequence[Json], chain: Sequence[RecordedTurn]
) -> list[Json] | PromptFork:
    """`incoming` with the recorded replies of `chain` in place of what the client sent for them:
    reasoning that it dropped is back, and arguments are spelled as they were sampled. A fork
    where it sent another reply than was recorded."""
    messages = list(incoming)
    for turn in chain:
        reason = reply_difference(turn.reply, messages[turn.reply_index])
        if reason is not None:
            return PromptFork(reason, f"message {turn.reply_index}")
        messages[turn.reply_index] = turn.reply
    return messages


def reply_difference(recorded: Json, echoed: Json) -> ForkReason | None:
    """None if a client that sent `echoed` can have meant `recorded`; else what is different.

    Equal: names and ids of calls; arguments as values; text, trimmed, which may be missing
    beside calls; reasoning, trimmed, which may be missing.
    """
    if echoed.get("role") != "assistant":
        return ForkReason.EDITED_HISTORY
    said, calls = recorded.get("tool_calls") or [], echoed.get("tool_calls") or []
    if len(said) != len(calls) or not all(map(_same_call, said, calls)):
        return ForkReason.EDITED_CALLS
    content = _said(echoed)
    if content != _said(recorded) and not (calls and not content):
        return ForkReason.EDITED_CONTENT
    reasoning = _reasoning(echoed)
    if reasoning and reasoning != _reasoning(recorded):
        return ForkReason.EDITED_REASONING
    return None


def fork_reason_of_miss(
    incoming: HashedConversation,
    recorded: Iterable[HashedConversation],
    refused: Iterable[HashedConversation] = (),
) -> ForkReason | None:
    """Why no key of `incoming` is filed; `recorded` are the rollout's conversations with their
    replies, `refused` those that the engine did not answer. None if none is recorded: the rollout's
    first turn has no reason to give."""
    recorded = list(recorded)
    if not recorded:
        return None
    if not incoming.replies:
        return ForkReason.NEW_CONVERSATION
    seen = {incoming.prefix_hashes[position] for position in incoming.replies}
    if any(known.prefix_hashes[-1] in seen for known in recorded):
        return ForkReason.TOOLS_CHANGED
    asked = (*recorded, *refused)
    closest = max(asked, key=lambda known: (_shared(incoming, known), len(known.prefix_hashes)))
    shorter = len(incoming.prefix_hashes) < len(closest.prefix_hashes)
    return ForkReason.COMPACTION if shorter else ForkReason.EDITED_HISTORY


def _shared(a: HashedConversation, b: HashedConversation) -> int:
    """How many messages both begin with."""
    low, high = 0, min(len(a.prefix_hashes), len(b.prefix_hashes))
    while low < high:
        middle = (low + high + 1) // 2
        # A mark stands for all the messages before it too.
        if a.prefix_hashes[middle - 1] == b.prefix_hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _mark(before: bytes, message: Json) -> bytes:
    """The rolling hash, one message further."""
    role = message["role"]
    if role == "assistant":
        fields = _reply_fields(message)
    else:
        content = message.get("content")
        if role == "system":
            content = without_billing_line(content)
        fields = [_content(content), str(message.get("tool_call_id")), str(message.get("name"))]
    # Each field with its length before it: no two messages give the same bytes.
    data = [before]
    for field in (role, *fields):
        encoded = field.encode("utf-8", "surrogatepass")
        data += (b"%d:" % len(encoded), encoded)
    return blake2b(b"".join(data), digest_size=16).digest()


def _reply_fields(message: Json) -> list[str]:
    calls = message.get("tool_calls")
    if not calls:
        return ["text", _said(message)]
    if all(call.get("id") for call in calls):
        return ["ids", *(str(call["id"]) for call in calls)]
    functions = [call.get("function") or {} for call in calls]
    named = [(str(f.get("name")), _value(f.get("arguments"))) for f in functions]
    return ["calls", _said(message), *(field for pair in named for field in pair)]


def _content(content: Any) -> str:
    """Text as the template gets it; parts that are no text as JSON."""
    if not isinstance(content, list):
        return content_text(content)
    if not has_media([{"content": content}]):
        return content_text(content)
    return json.dumps(content, sort_keys=True)


def _said(message: Json) -> str:
    return content_text(message.get("content"), joint="").strip()


def _reasoning(message: Json) -> str:
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return reasoning.strip() if isinstance(reasoning, str) else ""


def _same_call(recorded: Json, echoed: Json) -> bool:
    if recorded.get("id") != echoed.get("id"):
        return False
    said, sent = recorded.get("function") or {}, echoed.get("function") or {}
    if said.get("name") != sent.get("name"):
        return False
    mine, theirs = said.get("arguments"), sent.get("arguments")
    return mine == theirs or _value(mine) == _value(theirs)


def _value(arguments: Any) -> str:
    """Arguments as a text that does not depend on how they are spelled; `true` is not `1`, but
    `1.0` is. What is no JSON stands for itself."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    try:
        value = json.loads(text or "{}", parse_float=_number, parse_int=_number)
    except (json.JSONDecodeError, RecursionError):
        return text
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value

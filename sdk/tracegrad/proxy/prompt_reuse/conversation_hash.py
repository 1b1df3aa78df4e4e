"""Which recorded turn a conversation continues, by its messages.

A conversation has two keys at each of its positions: rolling hashes of its messages so far, and
of the tools and template arguments. A recorded turn is filed under the keys of its messages and
its reply; the longest position of a new conversation whose key is filed gives the turn that it
continues. Replies are hashed tolerantly, since clients write them down again: by the ids of their
tool calls where these are theirs alone (clients drop the text beside calls), otherwise by their
trimmed text and calls, and never by their reasoning. The second key leaves all ids out and takes
text and calls as they are: clients rewrite ids too. Whether a reply really came back as it was is
then decided by `reply_difference`.
"""

from __future__ import annotations

import ast
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import content_text, has_media, without_billing_line
from tracegrad.digests import blake2b
from tracegrad.events import Json
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork

# Integers beyond this are not exact in JavaScript, whose clients print them otherwise.
_EXACT = 2**53
# An id that only counts the calls of its conversation, as Kimi's "functions.bash:0" does: other
# conversations give it to other calls.
_COUNTED_ID = re.compile(r"(?:.*[^0-9A-Za-z])?[0-9]{1,9}", re.DOTALL)
# Characters of arguments within a text that are compared by their value.
_LONGEST_ARGUMENTS = 20_000


_HashValues = tuple[bytes, tuple[bytes, ...]]
ConversationValues = tuple[bytes, tuple[int, ...], _HashValues, _HashValues | None]


class HashedConversation:
    """Some messages, by what it takes to find the turn that they continue.

    `replies` are the positions of the model's own. `frame` is the key of tools and template
    arguments (`messages.RenderOptions.key`).
    """

    __slots__ = ("_by_id", "_by_text", "_messages", "frame", "replies")

    def __init__(
        self,
        frame: bytes,
        replies: tuple[int, ...],
        messages: Sequence[Json] = (),
        by_id: _Hashes | None = None,
        by_text: _Hashes | None = None,
    ) -> None:
        """`messages`: all of them, as long as hashes are missing."""
        self.frame = frame
        self.replies = replies
        self._messages = messages
        self._by_id = by_id or _Hashes()
        self._by_text = by_text or _Hashes()

    def __len__(self) -> int:
        return max(len(self._by_id.rolling), len(self._messages))

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
        """Item i stands for the first `i + 1` messages, 16 bytes.

        Made when somebody asks: what has no reply continues nothing, and a call's first words
        need not wait until a long prompt is hashed.
        """
        if missing := self._messages[len(self._by_id.rolling) :]:
            self._by_id = self._by_id.extended(missing, _fields)
        return self._by_id.rolling

    @property
    def text_hashes(self) -> tuple[bytes, ...]:
        """The same without the ids of tool calls."""
        if missing := self._messages[len(self._by_text.rolling) :]:
            if any(map(_has_ids, self._messages)):
                self._by_text = self._by_text.extended(missing, _text_fields)
            else:
                _ = self.prefix_hashes
                self._by_text = self._by_id
        return self._by_text.rolling

    @property
    def content_hashes(self) -> array[int]:
        """Of each message alone, without ids."""
        _ = self.text_hashes
        return self._by_text.contents

    def as_values(self) -> ConversationValues:
        """Its hashes as plain values, which another process makes one of again."""
        _, _ = self.prefix_hashes, self.text_hashes
        alike = self._by_text is self._by_id
        by_text = None if alike else self._by_text.as_values()
        return (self.frame, self.replies, self._by_id.as_values(), by_text)

    @classmethod
    def of_values(cls, values: ConversationValues) -> Self:
        frame, replies, by_id, by_text = values
        hashes = _Hashes.of_values(by_id)
        alike = hashes if by_text is None else _Hashes.of_values(by_text)
        return cls(frame, replies, by_id=hashes, by_text=alike)

    def continues(self, earlier: HashedConversation) -> None:
        """It was found to begin with `earlier`: those hashes need not be made once more."""
        if not self._by_text.rolling:
            self._by_text = earlier._by_text

    def holds(self, turn: RecordedTurn) -> bool:
        """Whether the reply of `turn` came back in it as it was recorded."""
        at = turn.reply_index
        return at < len(self._messages) and (
            reply_difference(turn.reply, self._messages[at]) is None
        )

    @property
    def key(self) -> bytes:
        """What a turn is filed under whose reply is the last of the messages."""
        return self.frame + self.prefix_hashes[-1]

    @property
    def text_key(self) -> bytes:
        """The same without the ids of tool calls."""
        return self.frame + self.text_hashes[-1]

    @property
    def prompt_key(self) -> bytes:
        """Of the messages before the last one, without ids: what a reply answers."""
        return self.frame + (self.text_hashes[-2] if len(self) > 1 else b"")

    def reply_keys(self) -> Iterator[tuple[int, bytes]]:
        """The position of each reply and the key at it, the last reply first."""
        for position in reversed(self.replies):
            yield position, self.frame + self.prefix_hashes[position]

    def reply_text_keys(self) -> Iterator[tuple[int, bytes]]:
        """The same without the ids of tool calls."""
        for position in reversed(self.replies):
            yield position, self.frame + self.text_hashes[position]

    def prompt_key_at(self, position: int) -> bytes:
        """The `prompt_key` of a turn whose reply would be the message at `position`."""
        return self.frame + (self.text_hashes[position - 1] if position else b"")

    def with_reply(self, reply: Json) -> HashedConversation:
        """With the reply to it."""
        _, _ = self.prefix_hashes, self.text_hashes
        by_id = self._by_id.extended([reply], _fields)
        alike = self._by_text is self._by_id and not _has_ids(reply)
        by_text = by_id if alike else self._by_text.extended([reply], _text_fields)
        return HashedConversation(
            self.frame, (*self.replies, len(self)), by_id=by_id, by_text=by_text
        )


def hash_conversation(messages: Sequence[Json], frame: bytes) -> HashedConversation:
    """`messages` are canonical: roles, contents, tool calls as in a chat completion request."""
    replies = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    return HashedConversation(frame, tuple(replies), messages)


def with_recorded_replies(
    incoming: Sequence[Json], chain: Sequence[RecordedTurn]
) -> list[Json] | PromptFork:
    """`incoming` with the recorded replies of `chain` in place of what the client sent for them:
    reasoning that it dropped is back, arguments are spelled as they were sampled, and calls and
    their results have the ids that were given out. A reply to which the client added text keeps
    that, where its tokens can be followed by more. A fork where it sent another reply than was
    recorded."""
    messages = list(incoming)
    for turn in chain:
        echoed = messages[turn.reply_index]
        reply = turn.reply
        reason = reply_difference(reply, echoed)
        if is_extended(turn, echoed):
            reply, reason = {**reply, "content": echoed["content"]}, None
        if reason is None and not _restore_ids(messages, turn):
            reason = ForkReason.EDITED_CALLS
        if reason is not None:
            return PromptFork(reason, f"message {turn.reply_index}")
        messages[turn.reply_index] = reply
    return messages


def is_extended(turn: RecordedTurn, echoed: Json) -> bool:
    """Whether the client sent the reply back with more text behind it, and no end token stands
    between: what was sampled may then be the beginning of what it sent."""
    if not turn.is_open or turn.reply.get("tool_calls"):
        return False
    more = _said(echoed)
    without = {**echoed, "content": turn.reply.get("content")}
    return (
        more != _said(turn.reply)
        and more.startswith(_said(turn.reply))
        and reply_difference(turn.reply, without) is None
    )


def _restore_ids(messages: list[Json], turn: RecordedTurn) -> bool:
    """Gives the results of a reply's calls the ids of the calls as they were recorded, where the
    client rewrote both. False if it gave two calls one id."""
    recorded = turn.reply.get("tool_calls") or []
    echoed = messages[turn.reply_index].get("tool_calls") or []
    pairs = [
        (sent.get("id"), known.get("id")) for known, sent in zip(recorded, echoed, strict=True)
    ]
    if all(sent == known for sent, known in pairs):
        return True
    given = dict(pairs)
    if len(given) != len(recorded):
        return False
    for position in range(turn.reply_index + 1, len(messages)):
        message = messages[position]
        if message.get("role") == "assistant":
            break
        if message.get("role") != "tool":
            continue
        if (known := given.get(message.get("tool_call_id"))) is not None:
            messages[position] = {**message, "tool_call_id": known}
    return True


def reply_difference(recorded: Json, echoed: Json) -> ForkReason | None:
    """None if a client that sent `echoed` can have meant `recorded`; else what is different.

    Equal: names of calls; arguments as values; text, trimmed, which may be missing beside calls;
    reasoning, trimmed, which may be missing. Ids of calls may be others.
    """
    if echoed.get("role") != "assistant":
        return ForkReason.EDITED_HISTORY
    said, calls = recorded.get("tool_calls") or [], echoed.get("tool_calls") or []
    if said and not calls and _said(echoed) not in ("", _said(recorded)):
        return ForkReason.CALLS_AS_TEXT
    if len(said) != len(calls) or not all(map(_same_call, said, calls)):
        return ForkReason.EDITED_CALLS
    content, before = _said(echoed), _said(recorded)
    if content != before and not (calls and not content):
        return _text_difference(before, content)
    reasoning = _reasoning(echoed)
    if reasoning and reasoning != _reasoning(recorded):
        return ForkReason.EDITED_REASONING
    return None


def _text_difference(recorded: str, echoed: str) -> ForkReason:
    if recorded and echoed.startswith(recorded):
        return ForkReason.EXTENDED_REPLY
    if _written_arguments(recorded) == _written_arguments(echoed) is not None:
        return ForkReason.RESPELLED_ARGUMENTS
    return ForkReason.EDITED_CONTENT


def _written_arguments(text: str) -> tuple[str, str] | None:
    """A text that ends with an object, as JSON or as Python writes it: what is before the object,
    without white space, and its value. None for any other, and for one that is too long to read."""
    start = text.find("{")
    if start < 0 or len(text) - start > _LONGEST_ARGUMENTS:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        try:
            value = ast.literal_eval(text[start : text.rfind("}") + 1])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    try:
        return "".join(text[:start].split()), arguments_value(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return None


def same_but_for_ids(one: Json, other: Json) -> bool:
    """Whether two messages differ in nothing that a prompt shows, but for ids of tool calls."""
    same: bool = one["role"] == other["role"] and _text_fields(one) == _text_fields(other)
    return same


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
    seen |= {incoming.text_hashes[position] for position in incoming.replies}
    if any({known.prefix_hashes[-1], known.text_hashes[-1]} & seen for known in recorded):
        return ForkReason.TOOLS_CHANGED
    if any(_is_reordered(known, incoming) for known in recorded):
        return ForkReason.MOVED_MESSAGE
    refused = list(refused)
    # A refused prompt that is sent again, or with more behind it, was not changed: the first one
    # of them has the reason. Without a reply in it there was none.
    first_reply = incoming.replies[0]
    again = [known for known in refused if len(known) > first_reply and _begins(incoming, known)]
    incoming = min(again, key=len, default=incoming)
    asked = (*recorded, *(known for known in refused if not _begins(incoming, known)))
    closest = max(asked, key=lambda known: (_shared(incoming, known), len(known)))
    shorter = len(incoming) < len(closest)
    return ForkReason.COMPACTION if shorter else ForkReason.EDITED_HISTORY


def _is_reordered(recorded: HashedConversation, incoming: HashedConversation) -> bool:
    """Whether messages of `recorded`, its reply among them, stand in another order in `incoming`.
    Of those that both have once: "ok" may be said anywhere."""
    before, now = recorded.content_hashes, incoming.content_hashes
    once = {content for content, count in Counter(before).items() if count == 1}
    once &= {content for content, count in Counter(now).items() if count == 1}
    return before[-1] in once and [c for c in before if c in once] != [c for c in now if c in once]


def _begins(whole: HashedConversation, beginning: HashedConversation) -> bool:
    return _shared(whole, beginning) == len(beginning)


def _shared(a: HashedConversation, b: HashedConversation) -> int:
    """How many messages both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        # A hash stands for all the messages before it too.
        if a.text_hashes[middle - 1] == b.text_hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


_Fields = Callable[[Json], list[str]]


class _Hashes(NamedTuple):
    """Of some messages: of each alone (8 bytes), and of each with all before it (16)."""

    contents: array[int] = array("Q")
    rolling: tuple[bytes, ...] = ()

    def extended(self, messages: Sequence[Json], fields: _Fields) -> _Hashes:
        contents, rolling = array("Q", self.contents), list(self.rolling)
        for message in messages:
            content = _content_hash(message["role"], fields(message))
            contents.append(int.from_bytes(content[:8]))
            before = rolling[-1] if rolling else b""
            rolling.append(blake2b(before + content, 16))
        return _Hashes(contents, tuple(rolling))

    def as_values(self) -> _HashValues:
        return self.contents.tobytes(), self.rolling

    @classmethod
    def of_values(cls, values: _HashValues) -> Self:
        contents = array("Q")
        contents.frombytes(values[0])
        return cls(contents, values[1])


def _content_hash(role: str, fields: list[str]) -> bytes:
    # Each field with its length before it: no two messages give the same bytes.
    data: list[bytes] = []
    for field in (role, *fields):
        encoded = field.encode("utf-8", "surrogatepass")
        data += (b"%d:" % len(encoded), encoded)
    return blake2b(b"".join(data), 16)


def _fields(message: Json) -> list[str]:
    """With the ids of tool calls. Equal to `_text_fields` for a message that has none."""
    calls = message.get("tool_calls")
    if message["role"] != "assistant":
        answered = message.get("tool_call_id")
        return [*_text_fields(message), *([] if answered is None else [str(answered)])]
    if calls and all(_is_unique(call.get("id")) for call in calls):
        return ["ids", *(str(call["id"]) for call in calls)]
    return _text_fields(message)


def _is_unique(call_id: Any) -> bool:
    return bool(call_id) and _COUNTED_ID.fullmatch(str(call_id)) is None


def _text_fields(message: Json) -> list[str]:
    role = message["role"]
    if role == "assistant":
        calls = message.get("tool_calls") or ()
        functions = [call.get("function") or {} for call in calls]
        named = [(str(f.get("name")), arguments_value(f.get("arguments"))) for f in functions]
        return ["said", _said(message), *(field for pair in named for field in pair)]
    content = message.get("content")
    if role == "system":
        content = without_billing_line(content)
    return [_content(content), str(message.get("name"))]


def _has_ids(message: Json) -> bool:
    return message.get("tool_call_id") is not None or bool(message.get("tool_calls"))


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
    said, sent = recorded.get("function") or {}, echoed.get("function") or {}
    if said.get("name") != sent.get("name"):
        return False
    mine, theirs = said.get("arguments"), sent.get("arguments")
    return mine == theirs or arguments_value(mine) == arguments_value(theirs)


def arguments_value(arguments: Any) -> str:
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

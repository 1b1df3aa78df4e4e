"""Input items of the Responses API as canonical messages.

One assistant message is spread over several items: reasoning, a message, calls. They become
one again. What belongs together is known by the turn in the ids that this proxy gave them, and
where a client dropped these, by the order in which a turn speaks (`_Turn.takes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import OBJECT, STRING
from tracegrad.proxy.dialects.openai_responses import custom_tools as custom
from tracegrad.proxy.dialects.openai_responses import reasoning as reasoning
from tracegrad.proxy.dialects.openai_responses.field_checks import (
    an_object,
    one_of,
    optional,
    refusal,
    required,
)
from tracegrad.proxy.dialects.openai_responses.response_ids import turn_of_item
from tracegrad.proxy.dialects.openai_responses.tools import flat_name

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "refusal", "input_image", "input_audio")
_DETAILS = ("auto", "low", "high")


@dataclass(slots=True)
class InputMessages:
    """`lead`: how many messages are the call's own instructions, which nothing may join: a later
    call continues the conversation without them."""

    lead: int = 0
    messages: list[Json] = field(default_factory=list)
    _turn: _Turn | None = None  # the assistant message that more items may join

    def add_message(self, role: str, content: Any) -> None:
        """A message of somebody else than the assistant."""
        if role == "system" and _is_text(self.messages[self.lead :], content):
            # What developers say before the conversation is one message: many templates take
            # no second one from the system, and Codex sends its instructions in several.
            self.messages[-1]["content"] += f"\n\n{content}"
            return
        self.messages.append({"role": role, "content": content})
        self._turn = None

    def add_tool_result(self, call_id: str, content: Any) -> None:
        """A tool's result."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        if self._turn is not None:
            self._turn.answered = True

    def turn(self, item: Json, kind: str) -> _Turn:
        """The turn that an item of the assistant's belongs to."""
        turn_id = turn_of_item(item.get("id"))
        turn = self._turn
        if turn is None or not turn.takes(kind, turn_id):
            turn = self._turn = _Turn({"role": "assistant", "content": None})
            self.messages.append(turn.message)
        turn.turn_id = turn.turn_id or turn_id
        return turn


@dataclass(slots=True)
class _Turn:
    """A canonical assistant message while its items are read."""

    message: Json
    turn_id: str | None = None
    answered: bool = False  # a result of one of its calls has been read

    def takes(self, kind: str, turn_id: str | None) -> bool:
        """Whether an item is part of this turn and not of the next one.

        With ids it is certain. Without, a turn's order decides: reasoning, then a message, then
        calls. A turn that has calls without results cannot be over, so a message or reasoning
        between a call and its result is still of the same turn; after a result another turn
        speaks. Two messages in a row are two turns: no turn of ours is told as two messages
        unless a call is between them.
        """
        if turn_id is not None and self.turn_id is not None:
            return turn_id == self.turn_id
        if self.answered:
            return False
        if "tool_calls" in self.message or kind == "call":
            return True
        return self.message["content"] is None

    def add_text(self, text: str) -> None:
        self.message["content"] = (self.message["content"] or "") + text

    def add_reasoning(self, text: str) -> None:
        self.message["reasoning"] = self.message.get("reasoning", "") + text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        self.message.setdefault("tool_calls", []).append(
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )


def read_input(value: object, instructions: str | None) -> InputMessages:
    """Raises BadRequest that names the item."""
    conversation = InputMessages()
    if instructions:
        conversation.add_message("system", instructions)
        conversation.lead = 1
    if isinstance(value, str):
        conversation.add_message("user", value)
        return conversation
    if not isinstance(value, list):
        raise refusal(
            "Invalid type for 'input': it is not a string or a list of items.",
            "input",
            code="invalid_type",
        )
    for index, entry in enumerate(value):
        where = f"input[{index}]"
        item = an_object(entry, where)
        _reader(item, where)(conversation, item, where)
    return conversation


Reader = Callable[[InputMessages, Json, str], None]


def _reader(item: Json, where: str) -> Reader:
    kind = optional(item, "type", STRING, where)
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        raise refusal(
            f"'{where}' refers to an item by its id. Items are not kept here: send the item "
            "itself, or 'previous_response_id' for all of a response.",
            where,
            code="unsupported_value",
        )
    reader = _READERS.get(kind)
    if reader is None:
        raise refusal(
            f"'{where}': items of type '{kind}' are not served, only "
            f"{', '.join(map(repr, _READERS))} are.",
            where,
            code="unsupported_value",
        )
    return reader


def _message(conversation: InputMessages, item: Json, where: str) -> None:
    required(item, "role", STRING, where)
    role = one_of(item, "role", _ROLES, where)
    content = item.get("content")
    if role == "assistant":
        texts = [content] if isinstance(content, str) else _texts(content, f"{where}.content")
        conversation.turn(item, "message").add_text("".join(texts))
        return
    role = "system" if role == "developer" else role
    conversation.add_message(role, _content(content, f"{where}.content"))


def _function_call(conversation: InputMessages, item: Json, where: str) -> None:
    arguments = required(item, "arguments", STRING, where)
    _call(conversation, item, where, arguments)


def _custom_call(conversation: InputMessages, item: Json, where: str) -> None:
    _call(conversation, item, where, custom.as_arguments(required(item, "input", STRING, where)))


def _call(conversation: InputMessages, item: Json, where: str, arguments: str) -> None:
    call_id = required(item, "call_id", STRING, where)
    name = required(item, "name", STRING, where)
    namespace = optional(item, "namespace", STRING, where)
    conversation.turn(item, "call").add_call(call_id, flat_name(name, namespace), arguments)


def _call_output(conversation: InputMessages, item: Json, where: str) -> None:
    call_id = required(item, "call_id", STRING, where)
    conversation.add_tool_result(call_id, _content(item.get("output"), f"{where}.output"))


def _reasoning(conversation: InputMessages, item: Json, where: str) -> None:
    # Without a text it says nothing; a client that dropped it is no worse off.
    if text := reasoning.text_of(item, where):
        conversation.turn(item, "reasoning").add_reasoning(text)


def _additional_tools(conversation: InputMessages, item: Json, where: str) -> None:
    """Read with the other tools (`responses_tools`); it says nothing."""


_READERS: dict[str, Reader] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning,
    "additional_tools": _additional_tools,
}


def _content(content: object, where: str) -> Any:
    """Text as one string, or the canonical parts where there are others among them."""
    if isinstance(content, str):
        return content
    parts = [_part(part, at) for part, at in _parts(content, where)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _texts(content: object, where: str) -> list[str]:
    """The texts of an assistant's message, which has nothing else."""
    texts = []
    for part, at in _parts(content, where):
        read = _part(part, at)
        if read["type"] != "text":
            raise refusal(f"'{at}': an assistant's message has only text here.", at)
        texts.append(read["text"])
    return texts


def _parts(content: object, where: str) -> Sequence[tuple[Json, str]]:
    if not isinstance(content, list):
        raise refusal(
            f"Invalid type for '{where}': it is not a string or a list of parts.",
            where,
            code="invalid_type",
        )
    return [
        (an_object(part, f"{where}[{index}]"), f"{where}[{index}]")
        for index, part in enumerate(content)
    ]


def _part(part: Json, where: str) -> Json:
    required(part, "type", STRING, where)
    kind = one_of(part, "type", _PARTS, where)
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_audio":
        return {
            "type": "input_audio",
            "input_audio": required(part, "input_audio", OBJECT, where),
        }
    field_name = "refusal" if kind == "refusal" else "text"
    return {"type": "text", "text": required(part, field_name, STRING, where)}


def _image(part: Json, where: str) -> Json:
    if part.get("file_id") is not None:
        raise refusal(
            f"'{where}.file_id': there are no files here; give the image in 'image_url'.",
            f"{where}.file_id",
            code="unsupported_value",
        )
    image: Json = {"url": required(part, "image_url", STRING, where)}
    detail = optional(part, "detail", STRING, where)
    if detail in _DETAILS:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _is_text(messages: Sequence[Json], content: object) -> bool:
    """Whether a system message follows one, and nothing but one, and both are plain text."""
    return (
        len(messages) == 1
        and messages[0]["role"] == "system"
        and isinstance(messages[0]["content"], str)
        and isinstance(content, str)
    )

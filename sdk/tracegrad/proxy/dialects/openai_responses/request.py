"""OpenAI's Responses API: `POST /v1/responses`.

What the engine can do is passed on. What only concerns OpenAI's billing, caching and storage
has no effect. What cannot be done is refused by name; so is every field that is not known.

Input items: one assistant message is spread over several (reasoning, a message, calls) and becomes
one again. What belongs together is known by the turn in the ids that this proxy gave them, and
where a client dropped these, by the order in which a turn speaks (`_Turn.takes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tracegrad.chat.call import Call, VisibleFields
from tracegrad.chat.messages import media_untrainable_reason, tool_call
from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import (
    BOOL,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Kind,
    json_object,
)
from tracegrad.proxy.dialects.openai_responses.field_checks import (
    LIST,
    an_object,
    missing,
    one_of,
    optional,
    refusal,
    required,
)
from tracegrad.proxy.dialects.openai_responses.response import (
    reasoning_text,
    turn_of_item,
    turn_of_response,
    whole_response,
)
from tracegrad.proxy.dialects.openai_responses.stream import ResponsesStreamWriter, error_type
from tracegrad.proxy.dialects.openai_responses.tools import (
    choose,
    custom_input_as_arguments,
    flat_name,
    tools_of,
)
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, BadRequest

PATH = "/v1/responses"

_LOGPROBS = "message.output_text.logprobs"

_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    # About tools and inputs that are not served, so there is never anything to include.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_MOST_TOP_LOGPROBS = 20

# Read below, one by one.
_READ: dict[str, Kind] = {
    "include": LIST,
    "instructions": STRING,
    "max_output_tokens": INTEGER,
    "model": STRING,
    "parallel_tool_calls": BOOL,
    "previous_response_id": STRING,
    "reasoning": OBJECT,
    "stream": BOOL,
    "text": OBJECT,
    "tools": LIST,
    "top_logprobs": INTEGER,
}

# No effect here: OpenAI's billing, caching and storage, and limits on its own tools.
_NO_EFFECT: dict[str, Kind] = {
    "access_programs": OBJECT,
    "client_metadata": OBJECT,  # Codex
    "image": OBJECT,
    "max_tool_calls": INTEGER,
    "metadata": OBJECT,
    "prompt_cache_key": STRING,
    "prompt_cache_options": OBJECT,
    "prompt_cache_retention": STRING,
    "safety_identifier": STRING,
    "service_tier": STRING,
    "store": BOOL,
    "stream_options": OBJECT,
    "user": STRING,
}

# Refused, unless null or the value that changes nothing.
_REFUSED: dict[str, tuple[object, str]] = {
    "background": (False, "wait for the response, or stream it"),
    "context_management": ([], "compact the conversation in the client"),
    "conversation": (None, "send 'previous_response_id' or the items themselves"),
    "moderation": (None, "leave it out"),
    "prompt": (None, "send the prompt's text in 'instructions' and 'input'"),
}

_NEVER_TRUNCATED = (
    "The input is never truncated here, with 'truncation' 'auto' neither: what would be dropped "
    "would be missing where it is trained. Shorten the input in the client."
)

# vLLM's own sampling fields of chat completions, passed on as they are. The engine judges those
# whose type is not relied on here.
_PASSED_ON: dict[str, Kind | None] = {
    **dict.fromkeys(DEFAULTS, NUMBER),
    "allowed_token_ids": LIST,
    "bad_words": LIST,
    "chat_template_kwargs": OBJECT,
    "ignore_eos": BOOL,
    "include_stop_str_in_output": BOOL,
    "length_penalty": NUMBER,
    "logit_bias": OBJECT,
    "min_tokens": INTEGER,
    "mm_processor_kwargs": OBJECT,
    "priority": INTEGER,
    "repetition_detection": OBJECT,
    "seed": INTEGER,
    "skip_special_tokens": BOOL,
    "spaces_between_special_tokens": BOOL,
    "stop": None,
    "stop_token_ids": LIST,
    "structured_outputs": OBJECT,
    "thinking_token_budget": INTEGER,
    "vllm_xargs": OBJECT,
}

UNKNOWN_PARAMETER = "unknown_parameter"  # OpenAI's code for it
# Of fields that the engine may complain about under its own names.
_CLIENTS_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}

_KNOWN = {
    "input",
    "tool_choice",
    "include_reasoning",
    "truncation",
    *_READ,
    *_NO_EFFECT,
    *_REFUSED,
    *_PASSED_ON,
}


class OpenAIResponsesDialect:
    name = "responses"

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> Call:
        request = json_object(raw)
        _check(request)
        previous = _previous(request)
        conversation = read_input(_input(request, previous), request.get("instructions"))
        include = _include(request)
        return Call(
            dialect=self.name,
            request=request,
            body={"messages": conversation.messages, **_settings(request, include)},
            stream=bool(request.get("stream")),
            visible=VisibleFields(
                logprobs=_LOGPROBS in include,
                reasoning=request.get("include_reasoning") is not False,
            ),
            previous=previous,
            instructions=conversation.lead,
            untrainable=media_untrainable_reason(conversation.messages),
        )

    def answer(self, call: Call, answer: Json) -> bytes:
        return whole_response(call, answer)

    def writer(self, call: Call) -> ResponsesStreamWriter:
        return ResponsesStreamWriter(call)

    def error(self, error: ApiError) -> bytes:
        """OpenAI's shape, whatever shape the engine's own refusal has."""
        # vLLM repeats the HTTP status as its code.
        code = None if error.code is not None and error.code.isdigit() else error.code
        too_long = error.code == CONTEXT_LENGTH_EXCEEDED
        # A name that is the client's own, though the engine has it too, is not put into its words.
        own = error.code == UNKNOWN_PARAMETER
        detail = {
            "message": f"{error.message} {_NEVER_TRUNCATED}" if too_long else error.message,
            "type": error_type(error.status),
            "param": error.param if own else _CLIENTS_NAMES.get(error.param or "", error.param),
            "code": code,
        }
        return orjson.dumps({"error": detail})


def _check(request: Json) -> None:
    for name in request:
        if name not in _KNOWN:
            raise refusal(f"Unknown parameter: '{name}'.", name, code=UNKNOWN_PARAMETER)
    for kinds in (_READ, _NO_EFFECT, _PASSED_ON, {"include_reasoning": BOOL}):
        for name, kind in kinds.items():
            if kind is not None:
                optional(request, name, kind)
    for name, (harmless, fix) in _REFUSED.items():
        if request.get(name) is not None and request[name] != harmless:
            raise refusal(f"'{name}' is not served: {fix}.", name, code="unsupported_parameter")
    # "auto" is for an input that does not fit, which `error` refuses: nothing is ever dropped.
    one_of(request, "truncation", ("auto", "disabled"))
    for key, value in (request.get("metadata") or {}).items():
        if not isinstance(value, str):
            raise refusal(f"'metadata.{key}' is not a string.", f"metadata.{key}", "invalid_type")


def _previous(request: Json) -> str | None:
    previous = request.get("previous_response_id")
    if previous is None:
        return None
    turn_id = turn_of_response(previous)
    if turn_id is None:
        raise previous_not_found(previous)
    return turn_id


def previous_not_found(response_id: str) -> BadRequest:
    return refusal(
        f"Previous response with id '{response_id}' not found.",
        "previous_response_id",
        code="previous_response_not_found",
    )


def _input(request: Json, previous: str | None) -> object:
    value = request.get("input")
    if value is None or value == []:
        if previous is None:
            raise missing("input")
        return []
    return value


def _include(request: Json) -> list[str]:
    include: list[str] = request.get("include") or []
    for index, value in enumerate(include):
        if value not in _INCLUDABLE:
            where = f"include[{index}]"
            raise refusal(
                f"Invalid value for '{where}'. Known are: {', '.join(_INCLUDABLE)}.", where
            )
    return include


def _settings(request: Json, include: list[str]) -> Json:
    """The canonical request but for its messages."""
    body: Json = {name: request[name] for name in _PASSED_ON if request.get(name) is not None}
    if (model := request.get("model")) is not None:
        body["model"] = model
    if (limit := request.get("max_output_tokens")) is not None:
        if limit < 1:
            raise refusal("'max_output_tokens' is less than 1.", "max_output_tokens")
        body["max_completion_tokens"] = limit
    tools, choice = choose(request, tools_of(request))
    if tools:
        body["tools"] = tools
        if choice is not None:
            body["tool_choice"] = choice
        if (parallel := request.get("parallel_tool_calls")) is not None:
            body["parallel_tool_calls"] = parallel
    if (effort := _effort(request)) is not None:
        body["reasoning_effort"] = effort
    if (form := _response_format(request)) is not None:
        body["response_format"] = form
    top = request.get("top_logprobs")
    if top is not None and not 0 <= top <= _MOST_TOP_LOGPROBS:
        raise refusal(f"'top_logprobs' is not within 0 and {_MOST_TOP_LOGPROBS}.", "top_logprobs")
    if top and _LOGPROBS in include:
        body["top_logprobs"] = top
    return body


def _effort(request: Json) -> str | None:
    """Summaries and the choice of earlier reasoning are left to the model's template: a summary
    is not made, and the response says so."""
    reasoning = request.get("reasoning") or {}
    one_of(reasoning, "summary", ("auto", "concise", "detailed"), "reasoning")
    one_of(reasoning, "generate_summary", ("auto", "concise", "detailed"), "reasoning")
    one_of(reasoning, "context", ("auto", "current_turn", "all_turns"), "reasoning")
    one_of(reasoning, "mode", ("standard",), "reasoning")
    effort: str | None = one_of(reasoning, "effort", _EFFORTS, "reasoning")
    return effort


def _response_format(request: Json) -> Json | None:
    text = request.get("text") or {}
    one_of(text, "verbosity", ("low", "medium", "high"), "text")
    if text.get("format") is None:
        return None
    form = an_object(text["format"], "text.format")
    required(form, "type", STRING, "text.format")
    kind = one_of(form, "type", ("text", "json_object", "json_schema"), "text.format")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    schema: Json = {
        "name": required(form, "name", STRING, "text.format"),
        "schema": required(form, "schema", OBJECT, "text.format"),
    }
    if (about := optional(form, "description", STRING, "text.format")) is not None:
        schema["description"] = about
    if (strict := optional(form, "strict", BOOL, "text.format")) is not None:
        schema["strict"] = strict
    return {"type": "json_schema", "json_schema": schema}


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
        speaks. Two messages in a row are two turns: no turn of ours is written as two messages
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
        self.message.setdefault("tool_calls", []).append(tool_call(call_id, name, arguments))


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
    _call(
        conversation, item, where, custom_input_as_arguments(required(item, "input", STRING, where))
    )


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
    if text := reasoning_text(item, where):
        conversation.turn(item, "reasoning").add_reasoning(text)


def _additional_tools(conversation: InputMessages, item: Json, where: str) -> None:
    """Read with the other tools (`tools_of`); it says nothing."""


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

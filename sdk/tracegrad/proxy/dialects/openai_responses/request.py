"""OpenAI's Responses API: `POST /v1/responses`.

What the engine can do is passed on. What only concerns OpenAI's billing, caching and storage
has no effect. What cannot be done is refused by name; so is every field that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tracegrad.chat.content_parts import media_untrainable_reason
from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad.events import Json
from tracegrad.proxy.dialects.base import Call, VisibleFields
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
from tracegrad.proxy.dialects.openai_responses.input_items import read_input
from tracegrad.proxy.dialects.openai_responses.response import whole_response
from tracegrad.proxy.dialects.openai_responses.response_ids import turn_of_response
from tracegrad.proxy.dialects.openai_responses.stream import ResponsesStreamWriter, error_type
from tracegrad.proxy.dialects.openai_responses.tools import choose, tools_of
from tracegrad.proxy.http.errors import ApiError, BadRequest

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
    "truncation": ("disabled", "shorten the input in the client"),
}
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
# Of fields that the engine may complain about under its own names.
_CLIENTS_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_KNOWN = {"input", "tool_choice", "include_reasoning", *_READ, *_NO_EFFECT, *_REFUSED, *_PASSED_ON}


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
        detail = {
            "message": error.message,
            "type": error_type(error.status),
            "param": _CLIENTS_NAMES.get(error.param or "", error.param),
            "code": code,
        }
        return orjson.dumps({"error": detail})


def _check(request: Json) -> None:
    for name in request:
        if name not in _KNOWN:
            raise refusal(f"Unknown parameter: '{name}'.", name, code="unknown_parameter")
    for kinds in (_READ, _NO_EFFECT, _PASSED_ON, {"include_reasoning": BOOL}):
        for name, kind in kinds.items():
            if kind is not None:
                optional(request, name, kind)
    for name, (harmless, mend) in _REFUSED.items():
        if request.get(name) is not None and request[name] != harmless:
            raise refusal(f"'{name}' is not served: {mend}.", name, code="unsupported_parameter")
    for key, value in (request.get("metadata") or {}).items():
        if not isinstance(value, str):
            raise refusal(f"'metadata.{key}' is not a string.", f"metadata.{key}", "invalid_type")


def _previous(request: Json) -> str | None:
    told = request.get("previous_response_id")
    if told is None:
        return None
    turn_id = turn_of_response(told)
    if turn_id is None:
        raise previous_not_found(told)
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
    told: list[str] = request.get("include") or []
    for index, value in enumerate(told):
        if value not in _INCLUDABLE:
            where = f"include[{index}]"
            raise refusal(
                f"Invalid value for '{where}'. Known are: {', '.join(_INCLUDABLE)}.", where
            )
    return told


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
    told = request.get("reasoning") or {}
    one_of(told, "summary", ("auto", "concise", "detailed"), "reasoning")
    one_of(told, "generate_summary", ("auto", "concise", "detailed"), "reasoning")
    one_of(told, "context", ("auto", "current_turn", "all_turns"), "reasoning")
    one_of(told, "mode", ("standard",), "reasoning")
    effort: str | None = one_of(told, "effort", _EFFORTS, "reasoning")
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

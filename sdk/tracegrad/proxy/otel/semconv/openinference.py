"""LLM spans by the conventions of OpenInference (Arize Phoenix and others).

Messages are flattened (`llm.input_messages.0.message.tool_calls.0.tool_call.function.name`);
request and response may stand whole, as JSON, in `input.value` and `output.value`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegrad.events import Json, Span
from tracegrad.proxy.otel.semconv.chat_completion import (
    LlmCall,
    first,
    function_tools,
    message_of,
    objects,
    parsed,
    request_of,
    response_of,
    tool_call,
    url_part,
    usage_of,
)
from tracegrad.proxy.otel.semconv.flat_attributes import in_index_order, unflatten

KIND = "openinference.span.kind"

_SPOKEN: Json = {"role": "assistant"}  # whether or not a reply says so
_COUNT = "llm.token_count."
# Of the invocation parameters, what says how the engine samples.
_SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens"),
    *("max_output_tokens", "stop", "seed", "n", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "tool_choice", "response_format", "reasoning_effort", "logit_bias"),
)


def read(span: Span) -> LlmCall | None:
    """None for a span that says neither what was asked nor what was answered: LlamaIndex's has two
    such around each call."""
    attributes = span.attributes
    asked, answered = (
        _object(attributes.get("input.value")),
        _object(attributes.get("output.value")),
    )
    wished = _object(attributes.get("llm.invocation_parameters"))
    said = _flat(attributes, "llm.output_messages")
    heard = _flat(attributes, "llm.input_messages")
    replies = [_message(each | _SPOKEN) for each in said] or _choices_of(answered, attributes)
    messages = [_message(each) for each in heard] or _asked(asked, attributes)
    model = first(attributes, ("llm.request.model_name", "llm.model_name")) or wished.get("model")
    response = response_of(
        id=_id_of(answered),
        model=first(attributes, ("llm.response.model_name", "llm.model_name")) or model,
        replies=replies,
        finish_reasons=_finish_reasons(attributes, answered),
        usage=usage_of(
            attributes.get(_COUNT + "prompt"),
            attributes.get(_COUNT + "completion"),
            cached=attributes.get(_COUNT + "prompt_details.cache_read"),
            reasoning=attributes.get(_COUNT + "completion_details.reasoning"),
        ),
    )
    if not messages and response is None:
        return None
    settings = {name: wished.get(name) for name in _SETTINGS}
    return LlmCall(request_of(model, messages, _tools(attributes, wished), settings), response)


def _flat(attributes: Mapping[str, Any], prefix: str) -> list[Json]:
    branches = in_index_order(unflatten(attributes, prefix))
    return [each["message"] for each in branches if isinstance(each.get("message"), dict)]


def _message(entry: Json) -> Json:
    calls: list[Json] = []
    for each in in_index_order(entry.get("tool_calls")):
        call = _branch(each, "tool_call")
        function = _branch(call, "function")
        calls.append(tool_call(call.get("id"), function.get("name"), function.get("arguments")))
    if not calls and (name := entry.get("function_call_name")):
        calls.append(tool_call(None, name, entry.get("function_call_arguments_json")))
    contents = [_branch(each, "message_content") for each in in_index_order(entry.get("contents"))]
    thought = [_text(each) for each in contents if each.get("type") == "reasoning"]
    parts = [_part(each) for each in contents if each.get("type") not in ("reasoning", "tool_use")]
    return message_of(
        entry.get("role"),
        parts or entry.get("content"),
        calls,
        tool_call_id=entry.get("tool_call_id"),
        name=entry.get("name"),
        reasoning="\n".join(filter(None, thought)),
    )


def _part(part: Json) -> Json:
    kind = part.get("type")
    for modality in ("image", "audio", "video"):
        url = _branch(_branch(part, modality), modality).get("url")
        if kind == modality and isinstance(url, str):
            return url_part(modality, url)
    return {"type": "text", "text": _text(part)} if kind == "text" else {"type": "other", **part}


def _text(part: Json) -> str:
    return str(part.get("text") or "")


def _branch(tree: Any, name: str) -> Json:
    inner = tree.get(name) if isinstance(tree, Mapping) else None
    return inner if isinstance(inner, dict) else {}


def _tools(attributes: Mapping[str, Any], wished: Json) -> list[Json]:
    branches = [
        _branch(each, "tool") for each in in_index_order(unflatten(attributes, "llm.tools"))
    ]
    found = function_tools([each.get("json_schema") for each in branches])
    return found or function_tools(wished.get("tools"))


def _asked(asked: Json, attributes: Mapping[str, Any]) -> list[Json]:
    """From the request itself; from its text, where it is no JSON."""
    if messages := objects(asked.get("messages")):
        return [_of_chat(each) for each in messages]
    prompts = [
        _branch(each, "prompt").get("text")
        for each in in_index_order(unflatten(attributes, "llm.prompts"))
    ]
    if prompts:
        return [message_of("user", text) for text in prompts]
    text = attributes.get("input.value")
    return [message_of("user", text)] if isinstance(text, str) and text and not asked else []


def _choices_of(answered: Json, attributes: Mapping[str, Any]) -> list[Json]:
    choices = [each["message"] for each in objects(answered.get("choices")) if "message" in each]
    if choices:
        return [_of_chat(each) for each in choices if isinstance(each, dict)]
    flat = (
        _branch(each, "completion").get("text")
        for each in in_index_order(unflatten(attributes, "llm.choices"))
    )
    if texts := [text for text in flat if text is not None]:
        return [message_of("assistant", text) for text in texts]
    text = attributes.get("output.value")
    return (
        [message_of("assistant", text)] if isinstance(text, str) and text and not answered else []
    )


def _of_chat(message: Json) -> Json:
    calls = []
    for each in objects(message.get("tool_calls")):
        function = _branch(each, "function")
        calls.append(tool_call(each.get("id"), function.get("name"), function.get("arguments")))
    fields = {
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "reasoning": message.get("reasoning") or message.get("reasoning_content"),
    }
    return message_of(message.get("role"), message.get("content"), calls, **fields)


def _finish_reasons(attributes: Mapping[str, Any], answered: Json) -> list[Any]:
    choices = objects(answered.get("choices"))
    if reasons := [each.get("finish_reason") for each in choices if each.get("finish_reason")]:
        return reasons
    if reason := attributes.get("llm.finish_reason") or answered.get("stop_reason"):
        return [reason]
    # LangChain's result.
    reason = _branch(_generation(answered), "generation_info").get("finish_reason")
    return [reason] if reason else []


def _id_of(answered: Json) -> Any:
    """Of the server's answer; LangChain's results have it further in."""
    if isinstance(answered.get("id"), str):
        return answered["id"]
    if isinstance(id := _branch(answered, "llm_output").get("id"), str):
        return id
    message = _branch(_branch(_generation(answered), "message"), "kwargs")
    return _branch(message, "response_metadata").get("id")


def _generation(answered: Json) -> Json:
    generations = answered.get("generations")
    while isinstance(generations, list) and generations:
        generations = generations[0]
    return generations if isinstance(generations, dict) else {}


def _object(value: Any) -> Json:
    parsed_value = parsed(value)
    return parsed_value if isinstance(parsed_value, dict) else {}

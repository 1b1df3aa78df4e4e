"""Google's Gemini API: requests into canonical calls (Gemini CLI speaks it and nothing else).

Field names are those of the `google-genai` package, 3.4. Unknown ones are refused, as the vendor
does.

Settings: a thinking budget has no effect but for 0, which turns thinking off.

Contents: consecutive contents of one role are one turn. Of a user turn, function responses come
first, one `tool` message each; of a model turn, text, thoughts and calls are three fields, so
their order among each other is not kept. Thought signatures have no effect: Gemini CLI makes
its own where it got none. A call without an id gets one, always the same for the same contents;
a response without an id answers the first call of its name that has none yet.
"""

from __future__ import annotations

import binascii
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson

from tracegrad.chat.call import Call, VisibleFields
from tracegrad.chat.messages import (
    assistant_message,
    content_of,
    media_kind,
    media_part,
    media_untrainable_reason,
    text_part,
    tool_call,
)
from tracegrad.events import Json
from tracegrad.proxy.dialects import tool_arguments
from tracegrad.proxy.dialects.body_checks import json_object
from tracegrad.proxy.dialects.gemini import response as output
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField
from tracegrad.proxy.dialects.gemini.stream import GeminiStreamWriter
from tracegrad.proxy.dialects.gemini.tools import json_schema, read_choice, read_tools
from tracegrad.proxy.http.errors import ApiError, BadRequest

NAME = "gemini"

STREAMED = "streamGenerateContent"

WHOLE = "generateContent"

# vLLM's own fields of chat completions, which it judges itself.
_VLLMS = {
    "chatTemplateKwargs": "chat_template_kwargs",
    "structuredOutputs": "structured_outputs",
    "vllmXargs": "vllm_xargs",
}

_SERVED = frozenset(
    (
        *_VLLMS,
        "contents",
        "systemInstruction",
        "tools",
        "toolConfig",
        "generationConfig",
        # The model is in the path; the others concern accounts, storage and filters at the
        # vendor: no effect.
        "model",
        "labels",
        "safetySettings",
        "serviceTier",
        "store",
    )
)

_REFUSED = {
    "cachedContent": "nothing is cached by name here; send the contents",
    "modelArmorConfig": "there is no such filter here",
}


@dataclass(frozen=True, slots=True)
class GeminiCall(Call):
    sse: bool = True  # a stream of server-sent events; else one JSON array, element by element


class GeminiDialect:
    """`path` has `model` and `method`, from `/v1beta/models/{model}:{method}`."""

    name = NAME

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> GeminiCall:
        method = path["method"]
        if method not in (STREAMED, WHOLE):
            raise BadRequest(f"the method {method!r} is not served", param="method", status=404)
        alt = query.get("alt") or query.get("$alt") or "json"
        if alt not in ("json", "sse"):
            raise BadRequest(f"alt is {alt!r}; served are json and sse", param="alt")
        request = json_object(raw)
        given = GeminiJsonField(request)
        body = _conversation(given, path["model"])
        refuse_open_end(given.require("contents"))
        settings, shown = read_config(given.get("generationConfig"))
        return _call(request, body | settings, shown, stream=method == STREAMED, sse=alt == "sse")

    def answer(self, call: Call, answer: Json) -> bytes:
        return output.whole_response(call, answer)

    def writer(self, call: Call) -> GeminiStreamWriter:
        return GeminiStreamWriter(call, array=isinstance(call, GeminiCall) and not call.sse)

    def error(self, error: ApiError) -> bytes:
        return output.error_body(error)


def count_request(raw: bytes, path: Mapping[str, Any]) -> Call:
    """`:countTokens`: a call that is only to be rendered and counted.

    The body is one of contents alone, or has a whole request under `generateContentRequest`.
    Raises BadRequest.
    """
    request = json_object(raw)
    given = GeminiJsonField(request)
    inner = given.get("generateContentRequest")
    if inner is not None:
        given.refuse_all_but(("generateContentRequest",))
        given = inner
    body = _conversation(given, path["model"])
    settings, shown = read_config(given.get("generationConfig"))
    return _call(request, body | settings, shown, stream=False, sse=False)


def count_answer(tokens: int) -> bytes:
    return orjson.dumps({"totalTokens": tokens})


def _call(
    request: Json, body: Json, shown: VisibleFields, *, stream: bool, sse: bool
) -> GeminiCall:
    return GeminiCall(
        dialect=NAME,
        request=request,
        body=body,
        stream=stream,
        visible=shown,
        untrainable=media_untrainable_reason(body["messages"]),
        sse=sse,
    )


def _conversation(given: GeminiJsonField, model: str) -> Json:
    """What the prompt is made of."""
    given.refuse_all_but(_SERVED, _REFUSED)
    tools = read_tools(given.get("tools"))
    body: Json = {
        "model": model.removeprefix("models/"),
        "messages": [
            *system_of(given.get("systemInstruction")),
            *messages_of(given.require("contents")),
        ],
    }
    if tools:
        body["tools"] = tools
    for name, its_own in _VLLMS.items():
        if (field := given.get(name)) is not None:
            body[its_own] = field.value
    return body | read_choice(given.get("toolConfig"), tools)


_NUMBERS = {
    "temperature": "temperature",
    "topP": "top_p",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}

# The engine's name, and the least that makes sense.
_INTEGERS = {
    "topK": ("top_k", None),
    "maxOutputTokens": ("max_tokens", 1),
    "candidateCount": ("n", 1),
    "seed": ("seed", None),
}

_SERVED_SETTINGS = (
    *_NUMBERS,
    *_INTEGERS,
    "stopSequences",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
    "_responseJsonSchema",
    "responseLogprobs",
    "logprobs",
    "responseModalities",
    "thinkingConfig",
)

_LEVELS = ("MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH")

_UNSPECIFIED = "THINKING_LEVEL_UNSPECIFIED"


def read_config(config: GeminiJsonField | None) -> tuple[Json, VisibleFields]:
    """Canonical fields, and what the client asked to see. Thoughts are shown on request only."""
    if config is None:
        return {}, VisibleFields(reasoning=False)
    config.refuse_all_but(_SERVED_SETTINGS)
    body: Json = {}
    for name, engine_name in _NUMBERS.items():
        if (field := config.get(name)) is not None:
            body[engine_name] = field.number()
    for name, (engine_name, least) in _INTEGERS.items():
        if (field := config.get(name)) is not None:
            body[engine_name] = field.integer(least)
    if (stops := config.get("stopSequences")) is not None and stops.texts():
        body["stop"] = stops.stop_strings()
    for modality in config.items_of("responseModalities"):
        modality.one_of(("TEXT", "MODALITY_UNSPECIFIED"))
    body.update(_format(config))
    logprobs = _logprobs(config, body)
    return body, VisibleFields(logprobs=logprobs, reasoning=_thinking(config, body))


def _logprobs(config: GeminiJsonField, body: Json) -> bool:
    shown = config.is_set("responseLogprobs")
    if (most := config.get("logprobs")) is not None:
        if not shown:
            raise most.error("is set, but responseLogprobs is not true")
        body["top_logprobs"] = most.integer(0)
    return shown


def _thinking(config: GeminiJsonField, body: Json) -> bool:
    thinking = config.get("thinkingConfig")
    if thinking is None:
        return False
    thinking.refuse_all_but(("includeThoughts", "thinkingBudget", "thinkingLevel"))
    level = thinking.get("thinkingLevel")
    budget = thinking.get("thinkingBudget")
    if level is not None and level.value != _UNSPECIFIED:
        body["reasoning_effort"] = level.one_of((*_LEVELS, *map(str.lower, _LEVELS))).lower()
    elif budget is not None and budget.integer(-1) == 0:
        body["reasoning_effort"] = "none"
    return thinking.is_set("includeThoughts")


def _format(config: GeminiJsonField) -> Json:
    mime = config.get("responseMimeType")
    kinds = ("text/plain", "application/json", "text/x.enum")
    kind = mime.one_of(kinds) if mime and mime.value else "text/plain"
    schema = config.get("responseSchema")
    plain = config.get("responseJsonSchema") or config.get("_responseJsonSchema")
    if schema is not None and plain is not None:
        raise plain.error("is set, and responseSchema too; leave one of them out")
    wanted = json_schema(schema) if schema else plain.object() if plain else None
    if kind == "application/json":
        if wanted is None:
            return {"response_format": {"type": "json_object"}}
        named = {"name": "response", "schema": wanted}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    given = schema or plain
    if kind == "text/x.enum":
        choices = (given or config.require("responseSchema")).require("enum").texts()
        return {"structured_outputs": {"choice": choices}}
    if given is not None:
        raise given.error("is set, but responseMimeType is not application/json")
    return {}


# What a part may have beside its data.
_BESIDE = ("thought", "thoughtSignature", "partMetadata")

_DATA = ("text", "inlineData", "fileData", "functionCall", "functionResponse")


def system_of(given: GeminiJsonField | None) -> list[Json]:
    """The system message of `systemInstruction`; none where it says nothing. Its role is not
    read: clients write all sorts of things there."""
    parts = given.items_of("parts") if given else []
    texts = [part.require("text").text() for part in parts]
    return [{"role": "system", "content": "\n".join(texts)}] if any(texts) else []


def messages_of(given: GeminiJsonField) -> list[Json]:
    contents = given.items()
    if not contents:
        raise given.error("is empty")
    messages: list[Json] = []
    calls = _Calls()
    for role, turn in groupby(contents, key=_role):
        parts = [part for content in turn for part in _parts(content)]
        if role == "model":
            messages.append(_assistant(parts, calls))
        else:
            messages += _user(parts, calls)
    return messages


def refuse_open_end(given: GeminiJsonField) -> None:
    """Contents that are to be answered end with the user's."""
    last = given.items()[-1]
    if _role(last) == "model":
        raise last.error(
            "is of role 'model', and it is the last; contents must end with a user turn or with "
            "function responses"
        )


class _Calls:
    """The function calls so far, and which of them have a response. In the time that their number
    takes: there may be a hundred thousand."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._answered: set[int] = set()
        # Places in `_ids`, in order: by id, by name, and (None) of all.
        self._by_id: dict[str, list[int]] = {}
        self._by_name: dict[str | None, deque[int]] = {None: deque()}

    def add(self, given_id: str | None, name: str) -> str:
        place = len(self._ids)
        call_id = given_id or f"call_{place}"
        self._ids.append(call_id)
        self._by_id.setdefault(call_id, []).append(place)
        for key in (name, None):
            self._by_name.setdefault(key, deque()).append(place)
        return call_id

    def answer(self, response: GeminiJsonField) -> str:
        """The id of the call that this is the response of."""
        given_id = response.get("id")
        name = response.get("name")
        if given_id is not None and given_id.text():
            self._answered.update(self._by_id.pop(given_id.text(), ()))
            return given_id.text()
        waiting = self._by_name.get(None if name is None else name.text(), deque())
        while waiting:
            place = waiting.popleft()
            if place not in self._answered:
                self._answered.add(place)
                return self._ids[place]
        raise response.error("answers no functionCall before it")


def _role(content: GeminiJsonField) -> str:
    role = content.get("role")
    if role is None or not role.text():
        return "user"
    known = role.one_of(("user", "model", "function"))
    return "user" if known == "function" else known


def _parts(content: GeminiJsonField) -> list[GeminiJsonField]:
    content.refuse_all_but(("role", "parts"))
    if content.get("parts") is None and _role(content) == "user":
        raise content.error("has no parts")
    return content.items_of("parts")


def _data(part: GeminiJsonField) -> GeminiJsonField:
    """The one field of a part that is its data."""
    part.refuse_all_but((*_BESIDE, *_DATA))
    found = [field for name in _DATA if (field := part.get(name)) is not None]
    if len(found) != 1:
        raise part.error(f"has not exactly one of {', '.join(_DATA)}")
    return found[0]


def _assistant(parts: list[GeminiJsonField], calls: _Calls) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    called: list[Json] = []
    for part in parts:
        data = _data(part)
        if data.named("text"):
            (thoughts if part.is_set("thought") else texts).append(data.text())
        elif data.named("functionCall"):
            called.append(_function_call(data, calls))
        else:
            raise data.error("is not served in a turn of the model")
    return assistant_message("".join(texts), called, "".join(thoughts))


def _function_call(call: GeminiJsonField, calls: _Calls) -> Json:
    call.refuse_all_but(
        ("id", "name", "args"), {"partialArgs": "send args", "willContinue": "send args"}
    )
    name = call.require("name").text()
    given_id = call.get("id")
    args = call.get("args")
    arguments = tool_arguments.as_text(args.object()) if args else "{}"
    return tool_call(calls.add(given_id.text() if given_id else None, name), name, arguments)


def _user(parts: list[GeminiJsonField], calls: _Calls) -> Iterator[Json]:
    results: list[Json] = []
    said: list[Json] = []
    for part in parts:
        data = _data(part)
        if data.named("functionResponse"):
            results.append(_response(data, calls))
        elif data.named("text"):
            said.append(text_part(data.text()))
        elif data.named("functionCall"):
            raise data.error("is not served in a turn of the user")
        else:
            said.append(_media(data))
    yield from results
    if said or not results:
        yield {"role": "user", "content": content_of(said)}


def _response(response: GeminiJsonField, calls: _Calls) -> Json:
    response.refuse_all_but(
        ("id", "name", "response", "parts", "scheduling"),
        {"willContinue": "a response is sent whole here"},
    )
    said: list[Json] = []
    answer = response.get("response")
    if answer is not None:
        said.append(text_part(_result_text(answer.object())))
    for part in response.items_of("parts"):
        part.refuse_all_but(("inlineData", "fileData"))
        said.append(_media(part.get("inlineData") or part.require("fileData")))
    return {"role": "tool", "tool_call_id": calls.answer(response), "content": content_of(said)}


def _result_text(response: Json) -> str:
    """What a function returned: the text under `output`, or else the object as JSON."""
    output = response.get("output")
    if len(response) == 1 and isinstance(output, str):
        return output
    return orjson.dumps(response).decode()


def _media(data: GeminiJsonField) -> Json:
    """`inlineData` or `fileData`."""
    mime_type = data.require("mimeType")
    kind = media_kind(mime_type.text().partition("/")[0])
    if kind is None:
        raise mime_type.error("is not of an image, audio or video; no other data is served")
    if data.named("fileData"):
        uri = data.require("fileUri")
        if not uri.text().startswith(("http://", "https://")) or "googleapis.com/" in uri.text():
            raise uri.error("is not a plain http(s) address; files at Google cannot be read here")
        return media_part(kind, uri.text())
    encoded = _base64(data.require("data"))
    return media_part(kind, f"data:{mime_type.text()};base64,{encoded}")


def _base64(data: GeminiJsonField) -> str:
    """In the standard alphabet: Google's clients also write the one for URLs."""
    text = data.text().translate(_STANDARD)
    text += "=" * (-len(text) % 4)
    try:
        binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise data.error("is not base64") from None
    return text


_STANDARD = str.maketrans("-_", "+/")

"""Whole answers of the Responses API: the `response` object and its output items."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson

from tracegrad.events import Json
from tracegrad.proxy.dialects.base import Call
from tracegrad.proxy.dialects.openai_responses import custom_tools as custom
from tracegrad.proxy.dialects.openai_responses import reasoning as reasoning
from tracegrad.proxy.dialects.openai_responses.logprobs import TextLogprobs, entries_of, in_item
from tracegrad.proxy.dialects.openai_responses.response_ids import item_id, response_id
from tracegrad.proxy.dialects.openai_responses.tools import tools_of

# Request fields that the response repeats as they are; null where the client left them out.
_REPEATED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
# Finish reasons that make a response incomplete, with OpenAI's names for why.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
ABORTED = "the engine gave up this answer before its end; send the request again"


class ResponseEnvelope:
    """The `response` object of one call, but for what changes while it is answered.

    What repeats the request is encoded once: a stream tells it three times, and tools are long.
    """

    def __init__(self, call: Call) -> None:
        request = call.request
        self._call = call
        self._created = int(time.time())
        self._fixed: Json = {
            **{name: request.get(name) for name in _REPEATED},
            "background": False,
            "metadata": request.get("metadata") or {},
            "parallel_tool_calls": _or(request.get("parallel_tool_calls"), True),
            "reasoning": {"effort": call.body.get("reasoning_effort"), "summary": None},
            "service_tier": "default",
            "temperature": _or(request.get("temperature"), 1.0),
            "text": orjson.Fragment(orjson.dumps(_text(request))),
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": orjson.Fragment(orjson.dumps(_tools(request))),
            "top_logprobs": request.get("top_logprobs") or 0,
            "top_p": _or(request.get("top_p"), 1.0),
            "truncation": "disabled",
        }

    def response(
        self,
        status: str,
        output: Sequence[Json] = (),
        *,
        model: str | None = None,
        usage: Json | None = None,
        incomplete: str | None = None,
        error: Json | None = None,
    ) -> Json:
        """For `orjson.dumps`. `model`: the engine's name, where the client gave none."""
        response: Json = {
            "id": response_id(self._call.turn_id),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self._call.request.get("model") or model or "",
            "output": output,
            "usage": usage_of(usage),
            **self._fixed,
        }
        if status == "completed":
            response["completed_at"] = int(time.time())
        return response

    def ended(
        self, finish_reason: str | None, output: Sequence[Json], *, usage: Any, model: str | None
    ) -> Json:
        """The response as the engine's finish reason leaves it."""
        if finish_reason == "abort":
            failure = {"code": "server_error", "message": ABORTED}
            return self.response("failed", output, model=model, usage=usage, error=failure)
        incomplete = incomplete_reason(finish_reason)
        status = "completed" if incomplete is None else "incomplete"
        return self.response(status, output, model=model, usage=usage, incomplete=incomplete)


def incomplete_reason(finish_reason: str | None) -> str | None:
    return _INCOMPLETE.get(finish_reason or "")


class OutputItems:
    """Makes the output items of one call."""

    def __init__(self, call: Call) -> None:
        self._turn_id = call.turn_id
        self._tools = tools_of(call.request)
        self._sealed = reasoning.ASKED_FOR in (call.request.get("include") or ())
        self._counts: Counter[str] = Counter()

    def new_id(self, prefix: str) -> str:
        number = self._counts[prefix]
        self._counts[prefix] += 1
        return item_id(prefix, self._turn_id, number)

    def is_custom(self, name: str) -> bool:
        tool = self._tools.get(name)
        return tool is not None and tool.custom

    def reasoning(self, item_id: str, text: str | None, status: str) -> Json:
        """`text` is None while there is none yet."""
        item: Json = {"id": item_id, "type": "reasoning", "summary": [], "content": []}
        if text is not None:
            item["content"] = [reasoning_part(text)]
            if self._sealed:
                item["encrypted_content"] = reasoning.sealed(text)
        return {**item, "status": status}

    def message(self, item_id: str, content: Sequence[Json], status: str) -> Json:
        return {
            "id": item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": list(content),
        }

    def call(self, item_id: str, call_id: str, name: str, arguments: str, status: str) -> Json:
        """Of a function, or of a custom tool: then `arguments` are its input."""
        tool = self._tools.get(name)
        item: Json = {"id": item_id, "call_id": call_id, "name": tool.name if tool else name}
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool is not None and tool.custom:
            return {**item, "type": "custom_tool_call", "input": arguments}
        return {**item, "type": "function_call", "arguments": arguments, "status": status}


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": in_item(logprobs),
    }


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def call_id_of(call: Json, turn_id: str, index: int) -> str:
    """The engine's id for a call; one of the turn's where an engine gives none."""
    told: str | None = call.get("id")
    return told or f"call_{turn_id}_{index}"


def whole_response(call: Call, answer: Json) -> bytes:
    """The body for a client that does not stream, from a whole `chat.completion`."""
    choice = answer["choices"][0]
    finish_reason = choice.get("finish_reason")
    items = _items_of(call, choice, cut=incomplete_reason(finish_reason) is not None)
    response = ResponseEnvelope(call).ended(
        finish_reason, items, usage=answer.get("usage"), model=answer.get("model")
    )
    return orjson.dumps(response)


def _items_of(call: Call, choice: Json, *, cut: bool) -> list[Json]:
    """The items of a whole answer; of an answer that was cut the last one is incomplete."""
    items = OutputItems(call)
    message = choice["message"]
    thought = message.get("reasoning") or ""
    text = message.get("content") or ""
    calls = message.get("tool_calls") or []
    has_message = bool(text) or not (calls or thought)
    last = len(calls) + has_message + bool(thought) - 1

    def status(position: int) -> str:
        return "incomplete" if cut and position == last else "completed"

    tokens = TextLogprobs()
    if call.visible.logprobs:
        tokens.add(entries_of(choice))
    output: list[Json] = []
    if thought:
        tokens.take(thought)
        output.append(items.reasoning(items.new_id("rs"), thought, status(0)))
    if has_message:
        part = text_part(text, tokens.take(text))
        output.append(items.message(items.new_id("msg"), [part], status(len(output))))
    for index, told in enumerate(calls):
        name, arguments = told["function"]["name"], told["function"]["arguments"]
        is_custom = items.is_custom(name)
        output.append(
            items.call(
                items.new_id("ctc" if is_custom else "fc"),
                call_id_of(told, call.turn_id, index),
                name,
                custom.as_text(arguments) if is_custom else arguments,
                status(len(output)),
            )
        )
    return output


def usage_of(usage: Any) -> Json | None:
    """OpenAI's shape of the engine's usage, or None where it told none."""
    if not usage:
        return None
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": thought or 0},
        "total_tokens": prompt + completion,
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _text(request: Json) -> Json:
    """As it was applied: an engine knows nothing of verbosity."""
    told = (request.get("text") or {}).get("format")
    return {"format": told or {"type": "text"}, "verbosity": "medium"}


def _tools(request: Json) -> list[Json]:
    """As OpenAI repeats them: with the fields that its types ask for."""
    return [_repeated(tool) for tool in request.get("tools") or ()]


def _repeated(tool: Json) -> Json:
    if tool["type"] == "namespace":
        inner = [_repeated(one) for one in tool["tools"]]
        return {**tool, "description": tool.get("description") or "", "tools": inner}
    if tool["type"] == "function":
        return {**tool, "parameters": tool.get("parameters"), "strict": bool(tool.get("strict"))}
    return tool

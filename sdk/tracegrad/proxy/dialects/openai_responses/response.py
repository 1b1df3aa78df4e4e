"""Whole answers of the Responses API: the `response` object and its output items.

Ids are made of the turn's id: resp_<turn>, rs_<turn>, msg_<turn>, fc_<turn>, fc_<turn>_1,
ctc_<turn>.

Reasoning: a client that keeps the conversation itself asks for `reasoning.encrypted_content` and
sends it back; Codex sends back nothing else of the reasoning. It gets the text itself in base64:
it has seen the text in the item's `content` already, so there is nothing to hide.

Log-probabilities: the engine reports every token, also those of reasoning, tool calls and the
markers between them, and it may report some before the text they become. Which belong to the
text is found by their bytes.
"""

from __future__ import annotations

import binascii
import re
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import STRING
from tracegrad.proxy.dialects.openai_responses.field_checks import (
    LIST,
    an_object,
    optional,
    refusal,
    required,
)
from tracegrad.proxy.dialects.openai_responses.tools import custom_input_as_text, tools_of

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

    What repeats the request is encoded once: a stream sends it three times, and tools are long.
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
            "truncation": request.get("truncation") or "disabled",
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
        self._sealed = ENCRYPTED_REASONING in (call.request.get("include") or ())
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
                item["encrypted_content"] = seal_reasoning(text)
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
    call_id: str | None = call.get("id")
    return call_id or f"call_{turn_id}_{index}"


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
    for index, tool_call in enumerate(calls):
        name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
        is_custom = items.is_custom(name)
        output.append(
            items.call(
                items.new_id("ctc" if is_custom else "fc"),
                call_id_of(tool_call, call.turn_id, index),
                name,
                custom_input_as_text(arguments) if is_custom else arguments,
                status(len(output)),
            )
        )
    return output


def usage_of(usage: Any) -> Json | None:
    """OpenAI's shape of the engine's usage, or None where it reported none."""
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
    wanted = (request.get("text") or {}).get("format")
    return {"format": wanted or {"type": "text"}, "verbosity": "medium"}


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


_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")

_ITEM = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_\d+)?")


def response_id(turn_id: str) -> str:
    return f"resp_{turn_id}"


def item_id(prefix: str, turn_id: str, number: int) -> str:
    """`number` counts the turn's items with this prefix from 0."""
    return f"{prefix}_{turn_id}_{number}" if number else f"{prefix}_{turn_id}"


def turn_of_response(value: str) -> str | None:
    """The turn that answered so; None for an id that is not of this proxy."""
    found = _RESPONSE.fullmatch(value)
    return found[1] if found else None


def turn_of_item(value: object) -> str | None:
    found = _ITEM.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


ENCRYPTED_REASONING = "reasoning.encrypted_content"

_MARK = "tg1."


def seal_reasoning(text: str) -> str:
    return _MARK + b64encode(text.encode()).decode()


def reasoning_text(item: Json, where: str) -> str:
    """A reasoning item's text: its content, else what was sealed, else its summary.

    Empty when it has none of these. Raises BadRequest, also for content that somebody else
    encrypted and that nothing else stands in for.
    """
    content = _texts(item, "content", where)
    if content:
        return "".join(content)
    summary = "\n".join(_texts(item, "summary", where))
    encrypted = optional(item, "encrypted_content", STRING, where)
    if encrypted and (encrypted.startswith(_MARK) or not summary):
        return _opened(encrypted, f"{where}.encrypted_content")
    return summary


def _texts(item: Json, name: str, where: str) -> list[str]:
    parts = optional(item, name, LIST, where) or []
    return [
        required(an_object(part, f"{where}.{name}[{index}]"), "text", STRING, f"{where}.{name}")
        for index, part in enumerate(parts)
    ]


def _opened(encrypted: str, where: str) -> str:
    try:
        if not encrypted.startswith(_MARK):
            raise ValueError
        return b64decode(encrypted[len(_MARK) :], validate=True).decode()
    except (ValueError, binascii.Error):
        raise refusal(
            f"'{where}' was not made here and cannot be read. Leave it out, or give the text "
            "in 'content'.",
            where,
            code="invalid_encrypted_content",
        ) from None


class TextLogprobs:
    """Tokens whose text has not been sent yet."""

    def __init__(self) -> None:
        self._entries: list[Json] = []
        self._bytes = bytearray()
        self._ends: list[int] = []  # where each entry's bytes end in `_bytes`

    def add(self, entries: Iterable[Json]) -> None:
        """Entries of the engine's `logprobs.content`."""
        for entry in entries:
            self._entries.append(entry)
            self._bytes += bytes(_bytes_of(entry))
            self._ends.append(len(self._bytes))

    def take(self, text: str) -> list[Json]:
        """The entries that `text` was made of; what came before them is forgotten.

        A token that is in two texts goes with the first. Empty where the text is not among
        the tokens' bytes: a parser has changed it, and any choice would be wrong.
        """
        if not self._entries or not text:
            return []
        wanted = text.encode()
        start = self._start_of(wanted)
        if start is None:
            return []
        end = start + len(wanted)
        taken = [
            entry
            for entry, first, last in self._spans()
            if entry is not _TOLD and first < end and last > start
        ]
        self._forget(end)
        return taken

    def _start_of(self, wanted: bytes) -> int | None:
        """Where the text begins: at a token if it can, since marks have letters in them too."""
        for start in [0, *self._ends[:-1]]:
            if self._bytes.startswith(wanted, start):
                return start
        start = self._bytes.find(wanted)
        return start if start >= 0 else None

    def _spans(self) -> Iterable[tuple[Json, int, int]]:
        return zip(self._entries, [0, *self._ends], self._ends, strict=False)

    def _forget(self, end: int) -> None:
        """Drop bytes up to `end`; a token that reaches beyond it stays, as it came."""
        rest = [
            (entry if first >= end else _TOLD, last - end)
            for entry, first, last in self._spans()
            if last > end
        ]
        self._entries = [entry for entry, _ in rest]
        self._ends = [last for _, last in rest]
        del self._bytes[:end]


_TOLD: Json = {}


def in_item(entries: Sequence[Json]) -> list[Json]:
    """In the shape that an output_text part has."""
    return [
        {
            "token": entry["token"],
            "bytes": _bytes_of(entry),
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "bytes": _bytes_of(top), "logprob": top["logprob"]}
                for top in entry.get("top_logprobs") or ()
            ],
        }
        for entry in entries
    ]


def in_event(entries: Sequence[Json]) -> list[Json]:
    """In the shape that events of text have."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]}
                for top in entry.get("top_logprobs") or ()
            ],
        }
        for entry in entries
    ]


def entries_of(choice: Json) -> list[Json]:
    entries: Any = (choice.get("logprobs") or {}).get("content")
    return entries or []


def _bytes_of(entry: Json) -> list[int]:
    listed = entry.get("bytes")
    return list(entry["token"].encode()) if listed is None else listed

"""What the engine is asked, and how its whole answers are read.

It is asked for token ids and log-probabilities with every call; a client sees them only if it
asked for them itself. Answers of `/v1/completions` keep the same things in other places; both
are read here.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import orjson
from msgspec import Raw, Struct
from msgspec.json import Decoder, encode

from tracegrad.chat.call import CHAT_PATH, Call, VisibleFields
from tracegrad.events import Json
from tracegrad.proxy.engine.completion import SampledCompletion, tool_call_id
from tracegrad.proxy.engine.fast_parse import LogprobEntry, extract_tokens, parse_token_ids
from tracegrad.proxy.engine.routed_experts import ROUTED_EXPERTS, set_routed_experts
from tracegrad.proxy.http.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    ENGINE_DIED,
    ApiError,
    EngineDied,
    UpstreamError,
)

_TOO_LONG = re.compile(rb"maximum context length|context_length_exceeded|exceeds model's max")


def read_error(status: int, raw: bytes, headers: Mapping[str, str]) -> ApiError:
    """The engine's refusal as it came, with its status.

    A prompt that is too long gets the code that OpenAI has for it: agents act on it.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if ENGINE_DIED in raw:
        return EngineDied(f"the engine died: {raw[:300].decode(errors='replace')}", raw=raw)
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        text = raw[:300].decode(errors="replace").strip()
        message = f"the engine answered {status}: {text}" if text else f"the engine says {status}"
        return UpstreamError(message, status=status, retry_after=headers.get("retry-after"))
    if status in (400, 413, 422) and _TOO_LONG.search(raw):
        return ApiError(
            400,
            error["message"],
            kind="invalid_request_error",
            param="messages",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return ApiError(
        status,
        error["message"],
        kind=str(error.get("type") or "upstream_error"),
        param=error.get("param") if isinstance(error.get("param"), str) else None,
        code=str(error["code"]) if error.get("code") is not None else None,
        retry_after=headers.get("retry-after"),
        raw=raw,
    )


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """`body` is what the client may see of it: canonical, or of text completions. `queued_s`: as
    `engine_queued_s`."""

    body: Json
    completions: list[SampledCompletion]
    queued_s: float | None = None


class _Logprobs(Struct, gc=False):
    """As chat completions (`content`) or text completions tell them; the rest is not for us."""

    content: list[LogprobEntry] | None = None
    token_logprobs: list[float | None] | None = None


# A whole answer is a hundred kilobytes of token ids and log-probabilities around some text.
# Taking these out unparsed, and reading of them only what is kept, is twice as fast as parsing
# it all into objects that are dropped at once.
_FIELDS = Decoder(dict[str, Raw])
_CHOICES = Decoder(list[dict[str, Raw]])
_LOGPROBS = Decoder(_Logprobs | None)
_NULL = Raw(b"null")


def read_response(raw: bytes, call: Call, version: int) -> EngineResponse:
    """The engine's whole answer. Raises ApiError (502) when it is none."""
    try:
        return _read_light(raw, call, version) or _read_any(raw, call, version)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UpstreamError("the engine's answer is not a completion") from None


def _read_light(raw: bytes, call: Call, version: int) -> EngineResponse | None:
    """A chat completion whose heavy parts are not parsed for its client; None for any other.

    A client of chat completions that asked for them gets them as the engine wrote them. Other
    dialects tell them in words of their own.
    """
    shown = call.visible
    if call.path != CHAT_PATH or ((shown.ids or shown.logprobs) and call.dialect != "chat"):
        return None
    parts = extract_tokens(raw, call.n)
    if parts is None:
        return None
    body = orjson.loads(parts.rest)
    choices = body["choices"]
    if len(choices) != call.n or not _was_cut(body, "prompt_token_ids") or not parts.prompt.values:
        return None
    replies: list[SampledCompletion] = []
    for choice, heavy in zip(choices, parts.choices, strict=True):
        if not (_was_cut(choice, "logprobs") and _was_cut(choice, "token_ids")):
            return None
        reply = SampledCompletion(prompt_token_ids=parts.prompt.values)
        reply.add(heavy.tokens.values, heavy.logprobs, version)
        replies.append(reply)
        if choice.get(ROUTED_EXPERTS) is not None:
            return None
        if heavy.routed_experts is not None:
            set_routed_experts(reply, heavy.routed_experts)
        choice["logprobs"] = orjson.Fragment(heavy.logprobs_text)
        choice["token_ids"] = orjson.Fragment(heavy.tokens.text)
    body["prompt_token_ids"] = orjson.Fragment(parts.prompt.text)
    return _closed(body, replies, call)


def _was_cut(holder: Json, name: str) -> bool:
    """Whether null stands here for what was cut out, and not in another object of the answer."""
    return name in holder and holder[name] is None


def _read_any(raw: bytes, call: Call, version: int) -> EngineResponse:
    fields = _FIELDS.decode(raw)
    prompt = _ids(fields, "prompt_token_ids")
    choices = _CHOICES.decode(fields["choices"])
    replies = [_reply(choice, prompt, version) for choice in choices]
    return _closed(_without_tokens(fields, choices, call.visible), replies, call)


def engine_queued_s(answer: Json) -> float | None:
    """How long a request waited in vLLM's own queue, in seconds: from its scheduler's queue to the
    first step that the request was a part of. Of a whole answer or of a stream's last chunk; None:
    the engine does not say. vLLM does where it was started with `--enable-per-request-metrics`, and
    not of calls with several choices or prompts."""
    metrics = answer.get("metrics")
    value = metrics.get("queue_time_ms") if isinstance(metrics, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1000 if isfinite(value) and value >= 0 else None


def _closed(body: Json, replies: list[SampledCompletion], call: Call) -> EngineResponse:
    for reply, choice in zip(replies, body["choices"], strict=True):
        if call.visible.one_tool_call and (
            tools := (choice.get("message") or {}).get("tool_calls")
        ):
            del tools[1:]
        for tool in (choice.get("message") or {}).get("tool_calls") or ():
            if tool.get("id"):
                tool["id"] = tool_call_id(tool["id"], call.tool_call_prefix)
        _close(reply, body, choice)
    strip_unrequested(body, call.visible)
    return EngineResponse(body, replies, engine_queued_s(body))


def _ids(fields: dict[str, Raw], name: str) -> array[int] | None:
    """A list of token ids, or None where there is no such list."""
    text = bytes(fields.get(name, _NULL))
    if text[:1] != b"[":
        return None
    try:
        return parse_token_ids(text[1:-1])
    except ValueError:
        return None


def _reply(choice: dict[str, Raw], shared: array[int] | None, version: int) -> SampledCompletion:
    """The tokens of one choice; text completions tell each choice's own prompt."""
    reply = SampledCompletion()
    prompt = shared or _ids(choice, "prompt_token_ids")
    if not prompt:
        reply.discard_tokens("no_tokens")
        return reply
    reply.prompt_token_ids = prompt
    logprobs = _LOGPROBS.decode(choice.get("logprobs", _NULL)) or _Logprobs()
    values: list[float] | list[float | None] | None = logprobs.token_logprobs
    if logprobs.content is not None:
        values = [entry.logprob for entry in logprobs.content]
    reply.add(_ids(choice, "token_ids"), values, version)
    set_routed_experts(reply, bytes(choice.get(ROUTED_EXPERTS, _NULL)))
    return reply


def _without_tokens(
    fields: dict[str, Raw], choices: list[dict[str, Raw]], shown: VisibleFields
) -> Json:
    """The answer as objects, without what neither the client sees nor the record needs."""
    if not shown.ids:
        fields.pop("prompt_token_ids", None)
    for choice in choices:
        if not shown.ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not shown.logprobs and "logprobs" in choice:
            choice["logprobs"] = _NULL
        if ROUTED_EXPERTS in choice:
            choice[ROUTED_EXPERTS] = _NULL
    body: Json = orjson.loads(encode({**fields, "choices": choices}))
    return body


def strip_unrequested(answer: Json, shown: VisibleFields) -> None:
    """Take out, in place, what the client did not ask for; of an answer or a chunk of one."""
    if not shown.ids:
        answer.pop("prompt_token_ids", None)
    for choice in answer["choices"]:
        if not shown.ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        if not shown.logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if not shown.reasoning:
            part = "message" if "message" in choice else "delta"
            # A copy: what was recorded keeps it.
            choice[part] = {k: v for k, v in choice[part].items() if k != "reasoning"}


def logprobs_of(choice: Json) -> Any:
    """Log-probabilities of the choice's new tokens, or None."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return None
    content = logprobs.get("content")
    if content is not None:
        return [entry["logprob"] for entry in content]
    return logprobs.get("token_logprobs")


def _close(reply: SampledCompletion, body: Json, choice: Json) -> None:
    """What ended the reply, and its canonical form."""
    reply.finish_reason = choice.get("finish_reason")
    reply.stop_reason = choice.get("stop_reason")
    reply.response = {
        **{key: body.get(key) for key in ("id", "created", "model", "usage")},
        "object": "chat.completion",
        "choices": [
            {
                "index": choice["index"],
                "message": _message(choice),
                "finish_reason": reply.finish_reason,
                "stop_reason": reply.stop_reason,
            }
        ],
    }


def _message(choice: Json) -> Json:
    if "text" in choice:
        return {"role": "assistant", "content": choice["text"]}
    message: Json = choice["message"]
    # vLLM names every field of OpenAI's, most of them null.
    return {key: value for key, value in message.items() if value is not None or key == "content"}

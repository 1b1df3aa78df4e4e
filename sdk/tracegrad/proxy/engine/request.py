"""What the engine is asked for one call, and the body of that request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import orjson

from tracegrad.chat.call import CHAT_PATH, Call
from tracegrad.chat.sampling_params import set_neutral
from tracegrad.proxy.engine.prompt_texts import prompt_texts
from tracegrad.proxy.engine.routed_experts import ROUTED_EXPERTS_START


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """How a call is put to the engine.

    `prompt_ids` takes the place of rendering the messages: vLLM uses these tokens as they are,
    and keeps its parsers (`kv_transfer_params`, meant for disaggregated decoding). Of a text
    completion it is the prompt.
    `return_tokens` is False for an engine that knows nothing of tokens. `routed_experts_from` is
    the first of the prompt's tokens whose routed experts are not known yet. `cache_salt`: calls
    share what the engine has cached with those of the same one alone.
    """

    stream: bool
    model: str | None = None
    prompt_ids: array[int] | None = None
    return_tokens: bool = True
    routed_experts_from: int = 0
    cache_salt: str | None = None


def request_body(call: Call, ask: EngineRequest) -> bytes:
    """The engine's request, as bytes of JSON."""
    body = dict(call.body)
    body.pop(ROUTED_EXPERTS_START, None)  # ours alone to say: no client sees what it is about
    if ask.model is not None:
        body["model"] = ask.model
    if ask.stream:
        body["stream"] = True
        # With the usage comes how long the request waited in the engine's queue.
        if call.visible.usage or not call.stream or ask.return_tokens:
            body["stream_options"] = {"include_usage": True}
    if ask.return_tokens:
        body["return_token_ids"] = True
        set_neutral(body)
        if call.path == CHAT_PATH:
            body["logprobs"] = True
        elif body.get("logprobs") is None:
            body["logprobs"] = 0  # the sampled token's, and no others
        # With include_reasoning false the engine hides ids and log-probabilities too.
        body.pop("include_reasoning", None)
        if not call.visible.logprobs:
            body.pop("top_logprobs", None)
        if ask.routed_experts_from and not ask.stream:
            body[ROUTED_EXPERTS_START] = ask.routed_experts_from
    if ask.cache_salt is not None:
        own = body.get("cache_salt")
        body["cache_salt"] = ask.cache_salt if own is None else f"{ask.cache_salt} {own}"
    if ask.prompt_ids is not None:
        text = orjson.dumps(ask.prompt_ids.tolist())
        prompt_texts.add(text, ask.prompt_ids)  # the engine's answer will have it
        if call.path == CHAT_PATH:
            body["kv_transfer_params"] = {"prompt_token_ids": orjson.Fragment(text)}
        else:
            body["prompt"] = orjson.Fragment(text)
    return orjson.dumps(body)

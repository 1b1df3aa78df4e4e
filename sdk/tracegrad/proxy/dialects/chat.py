"""OpenAI's chat completions: reading a request, asking the engine, reading its answer.

The engine is asked for token ids and log-probabilities with every call; a client sees them
only if it asked for them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from tracegrad.proxy.dialects.replies import Reply, prompt_of
from tracegrad.proxy.errors import ApiError, BadRequest
from tracegrad.records import Json

NAME = "chat"
PATH = "/v1/chat/completions"

# Below this vLLM takes the likeliest token.
GREEDY_BELOW = 1e-5

# vLLM's own defaults, served with `--generation-config vllm`.
SAMPLING_DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_SAMPLING_OPTIONAL = ("max_tokens", "max_completion_tokens", "seed", "stop", "stop_token_ids", "n")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# Each of these changes the distribution that tokens come from.
_CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "thinking_token_budget",
    "use_beam_search",
    "watermarking",
)

# Fields whose type the proxy relies on; the engine judges the rest.
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "model": (str, "a string"),
    "stream": (bool, "true or false"),
    "logprobs": (bool, "true or false"),
    "return_token_ids": (bool, "true or false"),
    "include_reasoning": (bool, "true or false"),
    "n": (int, "an integer"),
    **dict.fromkeys(SAMPLING_DEFAULTS, ((int, float), "a number")),
}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request for a chat completion, checked. `body` is as the client sent it."""

    body: Json
    stream: bool
    wants_ids: bool
    wants_logprobs: bool
    wants_reasoning: bool

    @property
    def messages(self) -> list[Json]:
        messages: list[Json] = self.body["messages"]
        return messages

    @property
    def sees_all(self) -> bool:
        """Whether the client gets the engine's answer without anything taken out."""
        return self.wants_ids and self.wants_logprobs and self.wants_reasoning

    def for_engine(self, model: str | None) -> bytes:
        """The engine's request; `model` takes the place of the name that the agent gave."""
        body = {**self.body, "logprobs": True, "return_token_ids": True}
        if model is not None:
            body["model"] = model
        # With include_reasoning false the engine hides ids and log-probabilities too.
        body.pop("include_reasoning", None)
        if not self.wants_logprobs:
            body.pop("top_logprobs", None)
        return orjson.dumps(body)

    def sampling(self) -> Json:
        """The settings that the engine sampled with, its defaults filled in."""
        body = self.body
        settings: Json = {
            name: default if (value := body.get(name)) is None else value
            for name, default in SAMPLING_DEFAULTS.items()
        }
        for name in _SAMPLING_OPTIONAL:
            if body.get(name) is not None:
                settings[name] = body[name]
        return settings

    def untrainable(self, sampling: Json) -> str | None:
        """Why tokens sampled like this must not be trained, or None."""
        if sampling["temperature"] < GREEDY_BELOW:
            return "greedy"
        if sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0:
            return "sampling_truncated"
        if self.body.get("logit_bias") or any(
            sampling[name] != SAMPLING_DEFAULTS[name] for name in _PENALTIES
        ):
            return "sampling_penalised"
        return "constrained" if _constrained(self.body) else None


def parse(raw: bytes) -> ChatCall:
    """Read a request's body. Raises BadRequest that names the field."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    _check_messages(body.get("messages"))
    for name, (kind, words) in _TYPES.items():
        value = body.get(name)
        # bool is an int to Python, not to JSON.
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ):
            raise BadRequest(f"{name} is not {words}", param=name)
    if (n := body.get("n")) is not None and n < 1:
        raise BadRequest("n is less than 1", param="n")
    return ChatCall(
        body=body,
        stream=bool(body.get("stream")),
        wants_ids=bool(body.get("return_token_ids")),
        wants_logprobs=bool(body.get("logprobs")),
        wants_reasoning=body.get("include_reasoning") is not False,
    )


def read_answer(raw: bytes, call: ChatCall, version: int) -> tuple[bytes, list[Reply]]:
    """The body for the client, and what was sampled, from the engine's whole answer.

    Raises ApiError when it is not a chat completion.
    """
    try:
        answer = orjson.loads(raw)
        choices = answer["choices"]
        replies = [_reply(answer, choice, version) for choice in choices]
        strip(answer, "message", call)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ApiError(
            502, "the engine's answer is not a chat completion", kind="upstream_error"
        ) from None
    for reply, choice in zip(replies, choices, strict=True):
        reply.response = {**answer, "choices": [choice]}
    return (raw if call.sees_all else orjson.dumps(answer)), replies


def strip(answer: Json, part: str, call: ChatCall) -> None:
    """Take out, in place, what the client did not ask for. `part`: "message" or "delta"."""
    if not call.wants_ids:
        answer.pop("prompt_token_ids", None)
    for choice in answer["choices"]:
        if not call.wants_ids:
            choice.pop("token_ids", None)
        if not call.wants_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if not call.wants_reasoning:
            choice[part].pop("reasoning", None)


def _reply(answer: Json, choice: Json, version: int) -> Reply:
    prompt = prompt_of(answer.get("prompt_token_ids"))
    reply = Reply(finish_reason=choice.get("finish_reason"))
    if not prompt:
        reply.drop("no_tokens")
    else:
        reply.prompt_token_ids = prompt
        reply.add(choice.get("token_ids"), logprob_entries(choice), version)
    return reply


def logprob_entries(choice: Json) -> Any:
    return (choice.get("logprobs") or {}).get("content")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of at least one message", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(
                f"messages[{index}] is not an object with a role", param=f"messages[{index}]"
            )


def _constrained(body: Json) -> bool:
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type", "text") != "text":
        return True
    tool_choice = body.get("tool_choice")
    if tool_choice == "required" or isinstance(tool_choice, dict):
        return True
    return any(body.get(name) for name in _CONSTRAINTS)

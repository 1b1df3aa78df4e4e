"""How the tokens of a call were sampled, and whether tokens sampled so may be trained.

Fields and defaults are those of vLLM's chat completions; an engine that has others is sent these
(`set_neutral`).
"""

from __future__ import annotations

from typing import Literal

from tracegrad.chat.messages import without_strict
from tracegrad.events import GREEDY_BELOW, Json

DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_OPTIONAL = ("max_tokens", "max_completion_tokens", "seed", "stop", "stop_token_ids", "n")
# These choose tokens in another way than by drawing them, or may: what `vllm_xargs` does is up to
# the engine's logits processors. The last two are other engines' names for the same.
_SAMPLERS = (
    "use_beam_search",
    "watermarking",
    "vllm_xargs",
    "logits_processors",
    "custom_logit_processor",
)
# Preferences about the distribution alone, no part of what the client asks for.
_BENDING = frozenset({*DEFAULTS, *_SAMPLERS, "logit_bias", "min_tokens", "bad_words"})
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
)


# What an engine is sent where the request says nothing: its own defaults may be a checkpoint's, or
# those that it was started with, and where watermarks are configured they are on.
_NEUTRAL: Json = {**DEFAULTS, "watermarking": False}


def set_neutral(body: Json) -> None:
    """What the request leaves open, in place, as `sampling_params_of` records it."""
    for name, value in _NEUTRAL.items():
        if body.get(name) is None:
            body[name] = value


def sampling_params_of(body: Json) -> Json:
    """The settings that the engine sampled with, the defaults filled in."""
    settings: Json = {
        name: default if (value := body.get(name)) is None else value
        for name, default in DEFAULTS.items()
    }
    for name in _OPTIONAL:
        if body.get(name) is not None:
            settings[name] = body[name]
    return settings


def force_on_policy(body: Json) -> Json:
    """The call sampled from the model's own distribution, whatever its client wished.

    What its answer is *for* stays: a tool that is forced by its name, response formats, stop
    strings, lengths. That some tool must be called is not: the reply may have no call then. Nor
    that there must be one call alone: it may have several.
    """
    free = {name: value for name, value in body.items() if name not in _BENDING}
    free["temperature"] = 1.0
    if isinstance(tools := body.get("tools"), list):
        free["tools"] = [without_strict(tool) for tool in tools]
    if body.get("tool_choice") == "required":
        free["tool_choice"] = "auto"
    if body.get("parallel_tool_calls") is False:
        del free["parallel_tool_calls"]
    return free


# Calls that an engine samples by a grammar, whatever they ask for.
EngineGrammar = Literal["asked", "tools", "chat"]


def engine_constrains(body: Json, grammar: EngineGrammar) -> bool:
    """Whether the engine samples this chat call by a grammar that it did not ask for."""
    return grammar == "chat" or (grammar == "tools" and bool(body.get("tools")))


def untrainable_reason(body: Json, settings: Json) -> str | None:
    """Why tokens sampled like this must not be trained, or None."""
    if settings["temperature"] < GREEDY_BELOW:
        return "greedy"
    if settings["top_p"] < 1 or settings["top_k"] > 0 or settings["min_p"] > 0:
        return "sampling_truncated"
    if body.get("logit_bias") or any(settings[name] != DEFAULTS[name] for name in _PENALTIES):
        return "sampling_penalised"
    if any(body.get(name) for name in _SAMPLERS):
        return "sampling_replaced"
    return "constrained" if _constraints(body) else None


def bending_fields(body: Json) -> list[str]:
    """What of the request makes `untrainable_reason` give one, for people: `temperature = 0`."""
    settings = sampling_params_of(body)
    bent = {
        "temperature": settings["temperature"] < GREEDY_BELOW,
        "top_p": settings["top_p"] < 1,
        "top_k": settings["top_k"] > 0,
        "min_p": settings["min_p"] > 0,
        **{name: settings[name] != DEFAULTS[name] for name in _PENALTIES},
    }
    return [
        *(f"{name} = {settings[name]:g}" for name, is_bent in bent.items() if is_bent),
        *(name for name in ("logit_bias", *_SAMPLERS) if body.get(name)),
        *_constraints(body),
    ]


def _constraints(body: Json) -> list[str]:
    """What allows the model only some of the tokens, as people would name it."""
    found = []
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type", "text") != "text":
        found.append("response_format")
    tool_choice = body.get("tool_choice")
    if tool_choice == "required" or isinstance(tool_choice, dict):
        found.append('tool_choice = "required"' if tool_choice == "required" else "tool_choice")
    # vLLM holds a strict tool's arguments to its schema while they are sampled.
    tools = body.get("tools")
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    if any(isinstance(each, dict) and each.get("strict") for each in functions):
        found.append("strict tools")
    # vLLM takes a grammar of one call for it, which spells that out too.
    if body.get("parallel_tool_calls") is False and tools and tool_choice != "none":
        found.append("parallel_tool_calls = false")
    # None and -1: as many tokens as it likes. At 0 the end of thinking is forced at once.
    if body.get("thinking_token_budget") not in (None, -1):
        found.append("thinking_token_budget")
    return found + [name for name in _CONSTRAINTS if body.get(name)]

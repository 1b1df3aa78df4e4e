"""What the engine sampled, in the form that every dialect hands to the recorder."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tracegrad.events import Json, logprob_array, token_id_array

# What vLLM writes where it has no log-probability.
MISSING_LOGPROB = -9999.0
_LISTS = (list, array)  # `list | array` is made anew at every use
# How vLLM's own ids of tool calls begin. Others are the model's words ("functions.look:0" of
# Kimi) or of the form that its template wants (nine characters for Mistral), and stay.
_ENGINE_TOOL_ID = "chatcmpl-tool-"


def tool_call_id(engine_id: str, prefix: str) -> str:
    """The id that clients get for a tool call: as unique as the engine's, of the form that
    libraries expect. Some rewrite all others, and the calls are then not found by their ids."""
    if not engine_id.startswith(_ENGINE_TOOL_ID):
        return engine_id
    return prefix + engine_id.removeprefix(_ENGINE_TOOL_ID)


@dataclass(slots=True)
class SampledCompletion:
    """One choice of one call: T sampled tokens, their log-probabilities, and a version each.

    `finish_reason` is None for a reply that was cut off. `response` is the engine's answer with
    this choice alone, in canonical form.
    """

    prompt_token_ids: array[int] = field(default_factory=token_id_array)
    token_ids: array[int] = field(default_factory=token_id_array)
    logprobs: array[float] = field(default_factory=logprob_array)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that hit
    response: Json = field(default_factory=dict)
    routed_experts: bytes | None = None  # as `Turn` has them
    discard_reason: str | None = None  # why its tokens cannot be trusted

    def add(self, ids: object, values: object, version: int) -> None:
        """Tokens that the engine sent together: ids, and as many log-probabilities.

        Anything that does not fit drops all tokens of the reply, which then says so.
        """
        if self.discard_reason is not None:
            return
        if not ids and not values:
            return
        if not isinstance(ids, _LISTS) or not isinstance(values, list):
            self.discard_tokens("no_tokens")
            return
        try:
            if len(ids) != len(values):
                raise ValueError("as many log-probabilities as token ids")
            self.logprobs.fromlist(values)
            self.token_ids.extend(ids)
        except (TypeError, ValueError, OverflowError):
            self.discard_tokens("no_tokens")
            return
        if min(values) <= MISSING_LOGPROB:
            self.discard_tokens("no_logprobs")
            return
        count, versions = len(ids), self.versions
        if versions and versions[-1][0] == version:
            versions[-1] = (version, versions[-1][1] + count)
        else:
            versions.append((version, count))

    def truncate(self, count: int) -> None:
        """To its first `count` tokens."""
        del self.token_ids[count:], self.logprobs[count:]
        kept, versions = 0, list[tuple[int, int]]()
        for version, number in self.versions:
            if (some := min(number, count - kept)) > 0:
                versions.append((version, some))
                kept += some
        self.versions = versions

    def discard_tokens(self, reason: str) -> None:
        """Forget the tokens; `reason` says why. The first reason stays."""
        if self.discard_reason is not None:
            return
        self.discard_reason = reason
        self.token_ids, self.logprobs, self.versions = token_id_array(), logprob_array(), []


def prompt_token_ids_of(value: object) -> array[int] | None:
    """The engine's `prompt_token_ids`, or None when there is no such list of integers."""
    if isinstance(value, array):
        return value
    if not isinstance(value, list):
        return None
    try:
        return token_id_array(value)
    except (TypeError, OverflowError):
        return None

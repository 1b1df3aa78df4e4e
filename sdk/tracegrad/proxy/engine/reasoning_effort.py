"""How hard a model is to think, in the words of an engine that knows few.

Harmony, the format of GPT-OSS, has three efforts, and vLLM refuses all others. Anthropic's and
Gemini's clients have more, and a way to turn thinking off: they get the nearest.
"""

from __future__ import annotations

from dataclasses import replace

from tracegrad.chat.call import Call
from tracegrad.proxy.http.errors import ApiError

_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_DIALECTS = ("messages", "gemini")


class ReasoningEfforts:
    """What the engine's refusals show of the efforts that it knows."""

    def __init__(self) -> None:
        self._few = False

    def fitted(self, call: Call) -> Call:
        """The call with an effort that the engine knows, as far as is known."""
        nearest = _nearest(call) if self._few else None
        if nearest is None:
            return call
        return replace(call, body={**call.body, "reasoning_effort": nearest})

    def learn(self, refusal: ApiError, call: Call) -> bool:
        """Whether another effort is to be asked for: the engine refused that of `call`."""
        said = refusal.message
        if refusal.status != 400 or "Harmony" not in said or "reasoning_effort" not in said:
            return False
        if _nearest(call) is None:
            return False
        self._few = True
        return True


def _nearest(call: Call) -> str | None:
    if call.dialect not in _DIALECTS:
        return None
    return _NEAREST.get(str(call.body.get("reasoning_effort")))

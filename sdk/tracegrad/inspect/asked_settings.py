"""What a request asked for that keeps its turn from being trained: which fields, and whether the
proxy's `sampling = "free"` would change that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tracegrad.chat.sampling_params import (
    bending_fields,
    force_on_policy,
    sampling_params_of,
    untrainable_reason,
)
from tracegrad.events import Turn
from tracegrad.proxy.dialects.registry import call_of

FREE_SAMPLING = "Overrule it: start the proxy with TRACEGRAD_PROXY_SAMPLING=free."


# Reasons that a request's own settings give.
_REASONS = frozenset(
    {"greedy", "sampling_truncated", "sampling_penalised", "sampling_replaced", "constrained"}
)


class AskedSettings(NamedTuple):
    """`fields` as in `temperature = 0`. `freed`: with `sampling = "free"` all of the calls could
    have been trained."""

    fields: list[str]
    freed: bool


def asked_settings(reason: str, turns: Iterable[Turn]) -> AskedSettings | None:
    """Of turns that have this reason; None where no request gave it, or its text is not stored."""
    if reason not in _REASONS:
        return None
    fields: dict[str, None] = {}
    freed = True
    for turn in turns:
        call = call_of(turn)
        if call is None:
            return None
        fields |= dict.fromkeys(bending_fields(call.body))
        free = force_on_policy(call.body)
        freed = freed and untrainable_reason(free, sampling_params_of(free)) is None
    return AskedSettings(list(fields), freed) if fields else None

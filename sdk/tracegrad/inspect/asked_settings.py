"""What a request asked for that keeps its turn from being trained: which fields, and what the
agent must leave out itself since the proxy's `sampling = "free"` keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tracegrad.chat.sampling_params import (
    bending_fields,
    force_on_policy,
)
from tracegrad.events import Turn
from tracegrad.proxy.dialects.registry import call_of

_FREE = "TRACEGRAD_PROXY_SAMPLING=free"
FREE_SAMPLING = f"Overrule it: start the proxy with {_FREE}."

# That a request's own settings give.
SETTINGS_REASONS = frozenset(
    {"greedy", "sampling_truncated", "sampling_penalised", "sampling_replaced", "constrained"}
)


class AskedSettings(NamedTuple):
    """Fields as in `temperature = 0`. `kept`: those of them that are there with
    `sampling = "free"` too, which alone keep a call from being trained."""

    fields: list[str]
    kept: list[str]

    @property
    def fix(self) -> str:
        if not self.kept:
            return FREE_SAMPLING
        freed = [field for field in self.fields if field not in self.kept]
        leave = (
            f"Leave {_listed(self.kept)} out of the agent's requests: {_FREE} does not overrule"
            " that."
        )
        if not freed:
            return f"{leave} Let the agent check the answer itself."
        return (
            f"{leave} Start the proxy with that setting against {_listed(freed)}, or change it in"
            " the requests too."
        )


def _listed(fields: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(fields[:-1]), fields[-1]]))


def asked_settings(reason: str, turns: Iterable[Turn]) -> AskedSettings | None:
    """Of turns that have this reason; None where no request gave it, or its text is not stored."""
    if reason not in SETTINGS_REASONS:
        return None
    fields: dict[str, None] = {}
    kept: dict[str, None] = {}
    for turn in turns:
        call = call_of(turn)
        if call is None:
            return None
        fields |= dict.fromkeys(bending_fields(call.body))
        kept |= dict.fromkeys(bending_fields(force_on_policy(call.body)))
    return AskedSettings(list(fields), list(kept)) if fields else None

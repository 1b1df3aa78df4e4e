"""DSPy's cache eats the samples of a group: an attempt that was answered from it has no call, and
its answer is another attempt's. Nothing else shows it; DSPy's own history says it."""

from __future__ import annotations

import logging
import sys

from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

_LOOKED_AT = 50  # entries of its history, the last ones
_warned = False


def warn_of_cached_answers() -> None:
    """To be called when a rollout that others are compared with has ended. Speaks once."""
    global _warned
    base_lm = sys.modules.get("dspy.clients.base_lm")
    if _warned or base_lm is None:
        return
    try:
        last = list(getattr(base_lm, "GLOBAL_HISTORY", ()))[-_LOOKED_AT:]
        hit = any(getattr(entry.get("response"), "cache_hit", False) for entry in last)
    except Exception as error:  # another version's history
        if is_of_signal_handler(error):
            raise
        return
    if hit:
        _warned = True
        _log.warning(
            "DSPy answered from its cache, in a rollout: attempts at one task then have one answer,"
            " and no call that could be trained. Make its models with dspy.LM(..., cache=False)"
        )

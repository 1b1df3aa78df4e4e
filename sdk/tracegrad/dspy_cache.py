"""DSPy's cache eats the samples of a group: an attempt that was answered from it has no call, and
its answer is another attempt's. Nothing else shows it; DSPy's own history says it."""

from __future__ import annotations

import logging
import sys
from itertools import takewhile
from typing import Any

from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

# Entries of its history, the last ones: a rollout's end may not wait for all 10,000.
LOOKED_AT = 1_000
_warned = False


def last_call() -> Any:
    """The newest entry of DSPy's history, for `warn_of_cached_answers`; None: there is none."""
    return next(iter(_newest_first()), None)


def warn_of_cached_answers(since: Any) -> bool:
    """To be called when a rollout that others are compared with has ended; `since`: what
    `last_call` gave when it began. Speaks once; says each time whether an answer was cached."""
    global _warned
    try:
        # An entry itself, and not its place: DSPy drops old ones at the front.
        of_rollout = takewhile(lambda entry: entry is not since, _newest_first())
        hit = any(map(_is_hit, of_rollout))
    except Exception as error:  # another version's history
        if is_of_signal_handler(error):
            raise
        return False
    if hit and not _warned:
        _warned = True
        _log.warning(
            "DSPy answered from its cache, in a rollout: attempts at one task then have one answer,"
            " and no call that could be trained. Make its models with dspy.LM(..., cache=False)"
        )
    return hit


def _is_hit(entry: dict[str, Any]) -> bool:
    """LiteLLM's responses are marked. Those of DSPy's own engine (3.4, with `api_base=`) come as
    they were stored; only the entry says that nothing was used, whatever the response says."""
    response = entry.get("response")
    if getattr(response, "cache_hit", False):
        return True
    several = response if isinstance(response, tuple) else (response,)  # of n > 1
    return entry.get("usage") == {} and any(map(_counts_tokens, several))


def _counts_tokens(response: Any) -> bool:
    usage = getattr(response, "usage", None)
    counts = (getattr(usage, name, None) for name in ("input_tokens", "output_tokens"))
    return any(count is not None for count in counts)


def _newest_first() -> list[Any]:
    history = getattr(sys.modules.get("dspy.clients.base_lm"), "GLOBAL_HISTORY", ())
    try:
        return list(history)[: -LOOKED_AT - 1 : -1]
    except TypeError:  # another version's history
        return []

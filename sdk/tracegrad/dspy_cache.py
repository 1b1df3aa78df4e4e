"""DSPy's cache eats the samples of a group: an attempt that was answered from it has no call, and
its answer is another attempt's. Nothing else shows it; DSPy's own history says it."""

from __future__ import annotations

import logging
import sys
from itertools import takewhile
from typing import Any

from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

_LOOKED_AT = 50  # entries of its history, the last ones
_warned = False


def last_call() -> Any:
    """The newest entry of DSPy's history, for `warn_of_cached_answers`; None: there is none."""
    return next(iter(_newest_first()), None)


def warn_of_cached_answers(since: Any) -> None:
    """To be called when a rollout that others are compared with has ended; `since`: what
    `last_call` gave when it began. Speaks once."""
    global _warned
    if _warned:
        return
    try:
        # An entry itself, and not its place: DSPy drops old ones at the front.
        of_rollout = takewhile(lambda entry: entry is not since, _newest_first())
        hit = any(getattr(entry.get("response"), "cache_hit", False) for entry in of_rollout)
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


def _newest_first() -> list[Any]:
    history = getattr(sys.modules.get("dspy.clients.base_lm"), "GLOBAL_HISTORY", ())
    try:
        return list(history)[: -_LOOKED_AT - 1 : -1]
    except TypeError:  # another version's history
        return []

"""A user's own filter: a function by its import path."""

from __future__ import annotations

import numpy as np

from tracegrad.events import Turn
from tracegrad.import_path import import_part
from tracegrad_trainer.batches.turn_access import RolloutLike


def apply_predicate(path: str, turn: Turn, rollout: RolloutLike) -> str | None:
    """None: the turn may be trained; else why not.

    Raises:
        ValueError: the function failed, or said neither a bool nor a reason.
    """
    where = f"predicate {path!r} on turn {turn.turn_id} of rollout {rollout.rollout_id}"
    try:
        answer = import_part("predicate", path)(turn, rollout)
    except Exception as error:
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
    if isinstance(answer, bool | np.bool_):
        reason = None if answer else "predicate"
    elif isinstance(answer, str) and answer:
        reason = answer
    else:
        raise ValueError(f"{where} returned {answer!r}: return True, False or a reason")
    return reason

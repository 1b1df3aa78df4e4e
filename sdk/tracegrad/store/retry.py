"""Transactions that lost against another one are tried again: a few times, and not all at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from tracegrad.store.databases import Conflict

_TRIES = 8
_FIRST_PAUSE_S = 0.005  # at most; doubled each time, 0.3 s before the last

T = TypeVar("T")


def retry_on_conflict(work: Callable[[], T], on: tuple[type[Exception], ...] = (Conflict,)) -> T:
    """What `work` returns, or raises in the end. It may run several times: each time as if for
    the first time, since what it did was rolled back."""
    pause_s = _FIRST_PAUSE_S
    for _ in range(_TRIES - 1):
        try:
            return work()
        except on:
            time.sleep(random.uniform(0, pause_s))
            pause_s *= 2
    return work()

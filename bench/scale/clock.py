"""The virtual clock in place of the system's, for what a process records.

Only `time.time` and `time.time_ns` change. Monotonic clocks are the real ones: how long a commit
or a call took is measured as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def virtual_time(now: Callable[[], float]) -> Iterator[None]:
    """`now`: seconds since the epoch. What has kept `time.time` itself before (a dataclass's
    `default_factory`) keeps the real clock: enter it before such modules are imported."""

    def now_ns() -> int:
        return round(now() * 1e9)

    with patch.object(time, "time", now), patch.object(time, "time_ns", now_ns):
        yield

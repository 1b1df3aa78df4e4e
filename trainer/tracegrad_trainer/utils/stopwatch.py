"""Seconds by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stopwatch:
    """Seconds by stage since the last `take`; no moment belongs to two stages or to none."""

    seconds: dict[str, float] = field(default_factory=dict)
    _mark: float = field(default_factory=time.monotonic)

    def lap(self, stage: str) -> None:
        """The time since the last lap belongs to `stage`."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._mark
        self._mark = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs inside belongs to `name`, also when it fails; the time before it to nothing."""
        self._mark = time.monotonic()
        try:
            yield
        finally:
            self.lap(name)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken

"""Where the time goes."""

from __future__ import annotations

import time
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

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken

"""What `trainer serve` prints while nothing trains: why, once, and again when that changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tracegrad.store import StoreError
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.rl.wait_reason import WaitReason

# Between two steps the trainer waits for agents as a matter of course: not worth a line until then.
PATIENCE_S = 30.0
# Between two looks, and the least time between two lines of one wait: agents come and go.
LOOK_S, LINES_S = 2.0, 30.0


class WaitNotice:
    """Asked at every poll of the supervisor; looks at the store now and then, while ranks wait."""

    def __init__(
        self,
        state_dir: Path,
        reason: Callable[[], WaitReason],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state_dir = state_dir
        self._reason = reason
        self._say = say
        self._clock = clock
        self._look_at = float("-inf")
        self._say_at = float("-inf")
        self._waited: bool | None = None  # at the last look; None: it has not waited yet
        self._said: str | None = None  # the kind that was said last, in this wait

    def tick(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        stage = (read_state(self._state_dir, "ranks") or {}).get("stage")
        if stage != "waiting":
            if self._waited:
                self._waited = False
            self._said = None
            return
        if self._waited is False:
            self._say_at = now + PATIENCE_S
        self._waited = True
        if now >= self._say_at:
            with suppress(StoreError):  # it is busy: the next look will do
                self._say_if_new(self._reason(), now)

    def _say_if_new(self, reason: WaitReason, now: float) -> None:
        if reason.kind in (self._said, "ready"):
            return
        self._said = reason.kind
        self._say_at = now + LINES_S
        self._say(f"waiting: {reason.text}")

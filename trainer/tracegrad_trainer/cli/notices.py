"""What commands print about ranks at work: why nothing trains, once and again when that changes,
and which patterns of `batches.agents` and its like fit no turn, each once."""

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


def unmatched_patterns_of(state_dir: Path) -> dict[str, str]:
    """By name, of batches and of live prompts, as those say that look at them. Ranks may have ended
    by now; what is left of a worker is an earlier run's."""
    ranks, worker = (read_state(state_dir, part) or {} for part in ("ranks", "resampling"))
    prompts: dict[str, str] = worker.get("unmatched", {}) if worker.get("alive") else {}
    batches: dict[str, str] = ranks.get("unmatched", {})
    return prompts | batches


class PatternNotice:
    """Asked at every poll of the ranks."""

    def __init__(self, state_dir: Path, say: Callable[[str], None]) -> None:
        self._state_dir = state_dir
        self._say = say
        self._said: set[str] = set()

    def tick(self) -> None:
        for pattern, line in unmatched_patterns_of(self._state_dir).items():
            if pattern not in self._said:
                self._said.add(pattern)
                self._say(line)

"""Parts of `trainer serve` that end are started again. One that keeps ending is given up, and the
run with it; one that nobody's calls need, such as the scorers, is tried again for ever.

Each part goes: up -> (it ended, or answers no more) down, for a pause -> starting -> up. Nothing
here waits: `tick` looks, and returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tracegrad.events import Json
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

# The first end is made good at once; the pauses behind it double.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# Of service, after which a part has proven itself.
STABLE_S = 60.0
# Looks and not time: a supervisor that was stopped itself (Ctrl-Z) blames nobody.
LOOK_EVERY_S, MISSED_LOOKS = 5.0, 12


class Backoff:
    """Ends in a row, with nothing achieved between them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.failures = 0

    def ended(self) -> float | None:
        """Seconds until the next start; None: it is given up."""
        self.failures += 1
        if self.failures > self.most:
            return None
        if self.failures == 1:
            return 0.0
        # A small exponent: `most` may be a thousand, and a float has its limits.
        return min(FIRST_PAUSE_S * 2.0 ** min(self.failures - 2, 10), LONGEST_PAUSE_S)

    def achieved(self) -> None:
        self.failures = 0


@dataclass(slots=True)
class Part:
    """`is_ready`: after a start; `answers`: while it is up, None where nobody asks.
    `proven_by_time`: a part that serves is proven by `STABLE_S` of it; ranks are by a step
    (`backoff.achieved`), and may be done, unless they asked to be started again. `essential`: the
    run ends where it is given up."""

    process: ChildProcess
    backoff: Backoff
    is_ready: Callable[[], bool]
    answers: Callable[[], bool] | None = None
    proven_by_time: bool = True
    essential: bool = True
    starts_again: Callable[[], bool] = lambda: False  # a part that ended well
    awaits: Callable[[], str | None] = lambda: None  # before it is started again: "when ..."
    restarts: int = 0
    last_end: str = ""
    last_end_at: float | None = None  # since the epoch
    # Times below are the supervisor's clock's.
    start_at: float | None = None  # it is down until then
    started_at: float | None = None  # it starts since then, and is not ready yet
    up_since: float = 0.0
    look_at: float = 0.0
    missed: int = 0

    @property
    def is_up(self) -> bool:
        return self.start_at is None and self.started_at is None

    def as_json(self) -> Json:
        return {
            "restarts": self.restarts,
            "up": self.is_up,
            "last_end": self.last_end,
            "last_end_at": self.last_end_at,
        }


@dataclass(slots=True)
class Supervisor:
    """Of parts that have been started, and are up. `say` has a line for people; `changed` hears
    that something of `as_json` did."""

    parts: Sequence[Part]
    ready_timeout_s: float
    say: Callable[[str], None]
    changed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = field(default=time.time)

    def as_json(self) -> Json:
        """Of each part that ended: how often, how last, and whether it is up."""
        return {part.process.name: part.as_json() for part in self.parts if part.restarts}

    def tick(self) -> None:
        """Raises ChildError: a part is given up."""
        for part in self.parts:
            try:
                self._look(part)
            except ChildError as error:
                self._ended(part, error)

    def _look(self, part: Part) -> None:
        """Raises ChildError: it has ended."""
        now = self.clock()
        if part.start_at is not None:
            if now >= part.start_at and part.awaits() is None:
                part.start_at, part.started_at = None, now
                part.process.start()
            return
        if part.process.exit_code() == 0 and not part.proven_by_time:
            if part.starts_again():  # else they are done
                self.say(f"{part.process.name} start again")
                part.process.start()
                part.started_at = now
            return
        part.process.check()
        if part.started_at is not None:
            self._await_ready(part, part.started_at, now)
            return
        if part.proven_by_time and part.backoff.failures and now - part.up_since >= STABLE_S:
            part.backoff.achieved()
        if part.answers is not None and now >= part.look_at:
            part.missed = 0 if part.answers() else part.missed + 1
            part.look_at = self.clock() + LOOK_EVERY_S
            if part.missed >= MISSED_LOOKS:
                raise ChildError(
                    f"{part.process.name} (pid {part.process.pid}) has not answered"
                    f" {MISSED_LOOKS} times in a row, {LOOK_EVERY_S:.0f} s apart"
                    f" (log: {part.process.log})"
                )

    def _await_ready(self, part: Part, since: float, now: float) -> None:
        if part.is_ready():
            part.started_at, part.up_since, part.missed = None, now, 0
            name, pid = part.process.name, part.process.pid
            self.say(f"{name} ready again (pid {pid}, {now - since:.0f} s)")
            self.changed()
        elif now - since > self.ready_timeout_s:
            raise ChildError(
                f"{part.process.name} is not ready after {self.ready_timeout_s:.0f} s"
                f" (log: {part.process.log})"
            )

    def _ended(self, part: Part, error: ChildError) -> None:
        # What is left of it ends first: it may hold a port, a lock, or GPUs.
        part.process.stop(grace_s=0)
        part.started_at, part.missed = None, 0
        part.restarts += 1
        part.last_end, part.last_end_at = str(error), self.wall()
        pause = part.backoff.ended()
        most, times = part.backoff.most, ""
        if pause is None:
            ends = part.backoff.failures
            times = f"; it has ended {ends} times in a row (max_restarts)" if most else ""
            if part.essential or not most:
                raise ChildError(f"{error}{times}") from error
            pause = LONGEST_PAUSE_S
        part.start_at = self.clock() + pause
        when = part.awaits() or (f"in {pause:.0f} s" if pause else "now")
        self.say(f"{error}{times}; it is started again {when}")
        self.changed()

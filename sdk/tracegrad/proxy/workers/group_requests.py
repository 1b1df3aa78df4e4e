"""What one worker asks of all: the supervisor passes it on, and gathers the answers.

A weight push comes to any worker and concerns all of them: it is answered when every worker that
serves has answered. One that ends meanwhile is not waited for, one that is only starting neither:
it does what it was sent before it gets a connection. One that does not answer in time is ended: a
push must know that nobody goes on with calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tracegrad.events import Json
from tracegrad.proxy.engine.weight_gate import Canary, canary_of

# What can be asked, as `GateOfAll` does.
HOLD, SET_VERSION, RELEASE, STATE, HEALTH = "hold", "set_version", "release", "state", "health"
SET_CANARY = "set_canary"
_CHANGES = frozenset({HOLD, SET_VERSION, RELEASE, SET_CANARY})
# Seconds for an answer, beside those that a hold waits for calls: of what must be done, and of
# what is only looked at.
ANSWER_S = 15.0
LOOK_S = 2.0


class GateNow(NamedTuple):
    """What a worker that starts has to join. `until`: when a hold opens by itself, on the clock of
    `time.monotonic`; None where only a release opens it. `lacks_version`: nothing does before a
    version is set. `versions` and `holds` (until when) are of single servers; `versions` also of a
    candidate's name."""

    version: int
    held: bool = False
    lacks_version: bool = False
    until: float | None = None
    pushes: bool = False
    versions: tuple[tuple[str, int], ...] = ()
    holds: tuple[tuple[str, float], ...] = ()
    canary: Canary | None = None

    def after(self, asked: str, args: Json, now: float) -> GateNow:
        upstream = args.get("upstream")
        others = tuple(each for each in self.holds if each[0] != upstream)
        if asked == HOLD and upstream is not None:
            return self._replace(holds=(*others, (upstream, now + args["ttl_s"])), pushes=True)
        if asked == HOLD:
            return self._replace(held=True, until=now + args["ttl_s"], pushes=True)
        if asked == SET_VERSION and (source := args.get("model") or upstream) is not None:
            kept = self._versions_but(source)
            return self._replace(versions=(*kept, (source, args["version"])))
        if asked == SET_VERSION:
            # Where a hold ran out before there was a version, that has opened nothing.
            ran_out = self.lacks_version and self.until is not None and self.until <= now
            until = None if ran_out else self.until
            return self._replace(
                version=args["version"], versions=(), lacks_version=False, until=until
            )
        if asked == RELEASE and upstream is not None:
            return self._replace(holds=others)
        if asked == RELEASE:
            return self._replace(held=self.lacks_version, until=None, holds=())
        if asked == SET_CANARY:
            canary = canary_of(**args)
            ended = self.canary.model if canary is None and self.canary is not None else None
            return self._replace(canary=canary, versions=self._versions_but(ended))
        return self

    def _versions_but(self, source: str | None) -> tuple[tuple[str, int], ...]:
        return tuple(each for each in self.versions if each[0] != source)

    def runs_out_in(self, now: float) -> float | None:
        """Seconds until the hold's time is over; None where it has none, or is over."""
        return self.until - now if self.until is not None and self.until > now else None

    def held_for(self, now: float) -> float | None:
        """Seconds that a hold lasts yet; infinite until a release; None where there is none."""
        if not self.held:
            return None
        if self.until is None or self.lacks_version:
            return float("inf")
        return self.until - now if self.until > now else None


@dataclass(slots=True)
class _Open:
    asker: int
    number: int  # the asker's own
    asked: str
    deadline: float
    waiting: set[int]
    results: list[Any] = field(default_factory=list)


class GroupRequests:
    """The supervisor's side. Times are on one clock, given with every call."""

    def __init__(self, send: Callable[[int, Json], None], gate: GateNow) -> None:
        """`send(worker, message)`."""
        self._send = send
        self.gate = gate
        self._open: dict[int, _Open] = {}
        self._count = 0

    def ask(
        self,
        asker: int,
        message: Json,
        *,
        all_: Collection[int],
        ready: Collection[int],
        now: float,
    ) -> None:
        """`all_` get the question; those of them that are `ready` are waited for."""
        asked, args = message["ask"], message["args"]
        self.gate = self.gate.after(asked, args, now)
        self._count += 1
        wait_s = LOOK_S if asked not in _CHANGES else ANSWER_S + args.get("drain_s", 0.0)
        found = _Open(asker, message["number"], asked, now + wait_s, set(ready))
        self._open[self._count] = found
        for worker in all_:
            self._send(worker, {"do": asked, "args": args, "number": self._count})
        self._settle(self._count)

    def answered(self, worker: int, message: Json) -> None:
        found = self._open.get(message["number"])
        if found is not None and worker in found.waiting:
            found.waiting.discard(worker)
            found.results.append(message["result"])
            self._settle(message["number"])

    def gone(self, worker: int) -> None:
        for number, found in list(self._open.items()):
            found.waiting.discard(worker)
            self._settle(number)

    def overdue(self, now: float) -> set[int]:
        """Workers that did not answer what had to be done."""
        late: set[int] = set()
        for number, found in list(self._open.items()):
            if found.deadline > now:
                continue
            if found.asked in _CHANGES:
                late |= found.waiting
            else:
                found.waiting.clear()
                self._settle(number)
        return late

    def next_deadline(self) -> float | None:
        return min((found.deadline for found in self._open.values()), default=None)

    def _settle(self, number: int) -> None:
        found = self._open[number]
        if not found.waiting:
            del self._open[number]
            self._send(found.asker, {"answer": found.number, "results": found.results})

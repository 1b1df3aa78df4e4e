"""Where the seconds of one call go: a mark of the monotonic clock between its stages.

Nothing here runs once a token. A stage lasts from its mark to the next one that was reached: of a
call that ended early the last stage is the one that it was in.
"""

from __future__ import annotations

from time import monotonic

from tracegrad.events import CALL_STAGES, Json

_IN_ONE_PIECE = "inference"
_IN_THE_ENGINE = "engine_queue"
# Stages in the order of the marks that begin them.
_STAGES = tuple(stage for stage in CALL_STAGES if stage not in (_IN_ONE_PIECE, _IN_THE_ENGINE))


class CallTiming:
    """Marks in seconds; None: not reached. `streaming`: whether the engine's first token is known
    from its last. `held_s`: how long of the engine's time weights were being pushed. `recorded`:
    the call's stages and its commit, once its turns are in the store. `broken`: a stream that had
    begun ended in an error. `died_at`: an engine ended in the middle of its stream, and the next
    one has said nothing yet; `without_engine_s`: how long that took, where it did before.
    `engine_queued_s`: of the time before the first token, how long the engine let the call wait for
    others, by its own word; None: it did not say."""

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "asked_at",
        "broken",
        "died_at",
        "ended_at",
        "engine_queued_s",
        "first_at",
        "gate_at",
        "held_s",
        "recorded",
        "sent_at",
        "streaming",
        "without_engine_s",
    )

    def __init__(self, arrived_at: float | None = None) -> None:
        self.arrived_at = monotonic() if arrived_at is None else arrived_at
        self.gate_at: float | None = None
        self.admitted_at: float | None = None
        self.asked_at: float | None = None
        self.sent_at: float | None = None
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.streaming = True
        self.held_s = 0.0
        self.recorded: dict[str, float] | None = None
        self.broken = False
        self.died_at: float | None = None
        self.without_engine_s = 0.0
        self.engine_queued_s: float | None = None

    @property
    def first_token_s(self) -> float | None:
        """From the arrival; None: the answer was no stream, or had none."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    def begin_again(self) -> None:
        """An engine died in the middle of its answer, and another one is asked: until it is, the
        call waits for an engine."""
        self.first_at = self.ended_at = None
        self.held_s = 0.0

    def goes_on(self) -> None:
        """An engine died in the middle of its stream, and another one is to say the rest. What the
        first one did stays as it was; until the next one speaks the call waits for an engine."""
        self.died_at, self.ended_at = self.ended_at, None

    def entered_gate(self) -> None:
        if self.gate_at is None:
            self.gate_at = monotonic()

    def admitted(self) -> None:
        if self.admitted_at is None:
            self.admitted_at = monotonic()

    def asked(self) -> None:
        if self.asked_at is None:
            self.asked_at = monotonic()

    def sent(self) -> None:
        """To a server; again where that one did not answer."""
        if self.died_at is None:
            self.sent_at = monotonic()

    def answered(self) -> None:
        """The first bytes of an answer are here: vLLM's come with the first token."""
        if self.died_at is not None:
            self.without_engine_s += monotonic() - self.died_at
            self.died_at = None
        elif self.streaming:
            self.first_at = monotonic()

    def ended(self) -> None:
        """The engine has said all, or nobody listens any more; the first time counts."""
        if self.ended_at is None:
            self.ended_at = monotonic()

    def stages(self, now: float) -> dict[str, float]:
        """Seconds by stage (`events.CALL_STAGES`); their sum is the time from arrival to `now`."""
        marks = (
            self.arrived_at,
            self.gate_at,
            self.admitted_at,
            self.asked_at,
            self.sent_at,
            self.first_at,
            self.ended_at,
        )
        reached = [mark for mark in zip(_STAGES, marks, strict=True) if mark[1] is not None]
        ends = [*(at for _, at in reached[1:]), now]
        found = {}
        for (stage, begin), end in zip(reached, ends, strict=True):
            if stage == "prefill" and not self.streaming:
                stage = _IN_ONE_PIECE
            found[stage] = max(0.0, end - begin)  # type: ignore[operator]
        if waited_s := self._without_engine_s(now):
            found["queue"] += waited_s
            found["decode"] = max(0.0, found["decode"] - waited_s)
        elif self.engine_queued_s is not None:
            return self._with_engine_queue(found, self.engine_queued_s)
        return found

    def _with_engine_queue(self, found: dict[str, float], queued_s: float) -> dict[str, float]:
        """What the engine says of its queue is cut out of what the proxy saw as one. Of a stream
        that went on it would be the second engine's, and the prefill is the first one's."""
        before = "prefill" if self.streaming else _IN_ONE_PIECE
        if before in found:
            found[_IN_THE_ENGINE] = min(queued_s, found[before])
            found[before] -= found[_IN_THE_ENGINE]
        return {stage: found[stage] for stage in CALL_STAGES if stage in found}

    def _without_engine_s(self, now: float) -> float:
        """Of the time between the first token and the last: that in which no engine spoke, since
        the one that did had died."""
        if self.died_at is None:
            return self.without_engine_s
        return self.without_engine_s + (self.ended_at or now) - self.died_at


def timing_json(stages: dict[str, float], held_s: float) -> Json:
    """As `events.Turn.timing` has it, to the microsecond."""
    found: Json = {stage: round(seconds, 6) for stage, seconds in stages.items()}
    if held_s > 0.0:
        found["held"] = round(held_s, 6)
    return found

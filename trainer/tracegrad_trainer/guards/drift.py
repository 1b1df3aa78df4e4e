"""Guards over the rollouts that training is about to use, in the order in which it uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tracegrad.events import Json
from tracegrad_trainer.guards.behaviour import Behaviour
from tracegrad_trainer.guards.config import GuardSettings, Signal
from tracegrad_trainer.guards.drift_detector import Drift, DriftDetector

# Replies count as long above so many times the baseline's longest twentieth, as short below the
# inverse of it times the shortest.
_LENGTH_FACTOR = 2.0
_TAIL = 0.05
_RECENT = 32
_LENGTHS: tuple[Signal, ...] = ("long_replies", "short_replies")


@dataclass(frozen=True, slots=True)
class ObservedRollout:
    behaviour: Behaviour
    version: int  # of the policy that sampled it last
    reward: float | None  # None: nobody said


@dataclass(frozen=True, slots=True)
class Alarm:
    """`last_good` is the newest version before the drift began; None: not known."""

    signal: str
    message: str
    last_good: int | None = None


@dataclass(slots=True)
class DriftGuards:
    """A detector a signal. `what` it is of, for messages. `lengths` are the baseline's, until there
    are enough; `recent` the oldest versions of the groups seen last: of those to come, rises may
    begin there too. `asked` are the versions before the drifts that the last look found."""

    settings: GuardSettings
    what: str = "rollouts"
    detectors: dict[str, DriftDetector] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))
    asked: frozenset[int] = frozenset()

    def observe(self, groups: Sequence[Sequence[ObservedRollout]]) -> list[Alarm]:
        """One alarm at most a signal. After it the signal begins with a new baseline: what drifted
        and was let go on is what is usual now."""
        found: dict[str, Alarm] = {}
        self.asked = frozenset()
        for group in groups:
            # Of several versions the oldest: a rollback that goes too far costs little.
            since = min((rollout.version for rollout in group), default=0)
            self.recent.append(since)
            for signal, share in self.group_shares(group):
                drift = self._detector(signal).add(share, since)
                if drift is not None:
                    alarm = self._alarm(signal, drift, grouped=len(group) > 1)
                    found.setdefault(signal, alarm)
                    # First: its version must not be removed from the disk before it is decided on.
                    if alarm.last_good is not None:
                        self.asked |= {alarm.last_good}
                    del self.detectors[signal]
        return list(found.values())

    def check_step(self, entropy: float | None, kl: float | None) -> list[Alarm]:
        """Of a step's own figures, nats a token; None: not measured."""
        alarms = []
        low, high = self.settings.min_entropy, self.settings.max_kl
        if low is not None and entropy is not None and entropy < low:
            message = f"entropy: {entropy:.3g} nats a token, below guards.min_entropy = {low:g}"
            alarms.append(Alarm("entropy", message))
        if high is not None and kl is not None and kl > high:
            message = f"kl: {kl:.3g} nats a token, above guards.max_kl = {high:g}"
            alarms.append(Alarm("kl", message))
        return alarms

    def forget(self, signals: Iterable[str]) -> None:
        """They begin with new baselines: somebody looked, and let training go on."""
        for signal in signals:
            self.detectors.pop(signal, None)

    def good_versions(self) -> set[int]:
        """Those that an alarm may ask for soon: each the last one before a rise, of what seems to
        rise now or may begin to."""
        detectors = [*self.detectors.values()]  # at once: another thread may ask
        began = {version for one in detectors for version in one.began} | {*self.recent.copy()}
        return {version - 1 for version in began if version > 0} | self.asked

    def shares(self) -> dict[str, float]:
        """Evidence of each signal over its limit: 1 is an alarm. For metrics."""
        return {name: one.evidence / one.limit for name, one in self.detectors.items()}

    def state(self) -> Json:
        detectors = {name: one.state() for name, one in self.detectors.items()}
        lists = {"lengths": list(self.lengths), "recent": list(self.recent)}
        return {"detectors": detectors, **lists}

    def restore(self, state: Json) -> None:
        """What other settings asked for and these do not is left out."""
        self.detectors.clear()
        self.recent = deque(state.get("recent", []), _RECENT)
        self.lengths = [int(length) for length in state.get("lengths", [])]
        kept = state.get("detectors", {})
        for signal in self.settings.watch:
            if signal in kept:
                self.detectors[signal] = self._new(signal).restored(kept[signal])

    def group_shares(self, group: Sequence[ObservedRollout]) -> Iterator[tuple[Signal, float]]:
        """By signal, of the group's rollouts: to be asked once for each group, in order, as the
        lengths of the first ones are a baseline.

        One value for all of a group, because attempts at one task do alike, and values that follow
        each other are news to a detector only where they are no repeats: sixteen attempts that all
        ask back say that of one task, not of the policy."""
        watch = self.settings.watch
        values: dict[Signal, list[bool]] = {}
        for rollout in group:
            for signal, value in self._of(rollout.behaviour):
                if value is not None and signal in watch:
                    values.setdefault(signal, []).append(value)
        rewards = [one.reward for one in group if one.reward is not None]
        if "unsolved" in watch and len(group) > 1 and len(rewards) == len(group):
            values["unsolved"] = [max(rewards) < self.settings.solved_from]
        for signal, of in values.items():
            yield signal, sum(of) / len(of)

    def _of(self, behaviour: Behaviour) -> Iterator[tuple[Signal, bool | None]]:
        yield "invalid_tool_calls", behaviour.invalid_tool_calls
        yield "no_ops", behaviour.no_ops
        yield "questions", behaviour.questions
        yield "refusals", behaviour.refusals
        if len(self.lengths) < self.settings.baseline:
            self.lengths.append(behaviour.reply_tokens)
            if len(self.lengths) == self.settings.baseline:
                self.lengths.sort()
            return
        tail = int(_TAIL * len(self.lengths))
        shortest, longest = self.lengths[tail], self.lengths[-1 - tail]
        yield "long_replies", behaviour.reply_tokens > _LENGTH_FACTOR * longest
        yield "short_replies", behaviour.reply_tokens * _LENGTH_FACTOR < shortest

    def _detector(self, signal: Signal) -> DriftDetector:
        if signal not in self.detectors:
            self.detectors[signal] = self._new(signal)
        return self.detectors[signal]

    def _new(self, signal: Signal) -> DriftDetector:
        settings = self.settings
        # What is long is a matter of the baseline already: of it, at most a twentieth is.
        size = 0 if signal in _LENGTHS else settings.baseline
        return DriftDetector(size, settings.margin, settings.false_alarm_every)

    def _alarm(self, signal: str, drift: Drift, *, grouped: bool) -> Alarm:
        if not grouped:
            what = f"the last {drift.values} {self.what}"
        elif signal == "unsolved":
            what = f"the last {drift.values} groups"
        else:
            what = f"{self.what} of the last {drift.values} groups"
        message = (
            f"{signal}: {drift.recent:.0%} of {what}, since version {drift.rise_began},"
            f" against {drift.baseline:.0%} before (at most {drift.allowed:.0%};"
            f" evidence {drift.evidence:.2g})"
        )
        return Alarm(signal, message, drift.rise_began - 1 if drift.rise_began > 0 else None)

"""The gate: a version is a candidate until its rollouts say what it is: held-out ones, or those of
a share of traffic (canary).

One engine serves one version at a time, so a comparison is of rollouts that were sampled one after
the other: those of the promoted version since it was promoted, and those of the candidate. The
promoted one's own as a candidate do not count again: it was promoted because they were good, and
whatever came after it would seem worse. Training waits while either arm is gathered: what is
sampled meanwhile is of the weights that go on training, and nothing of it becomes stale.

With a canary two versions are served at once, each to rollouts of its own. Their rollouts are
compared that ended since the candidate was pushed, so that both arms saw the same traffic.

A rollout that can get no reward (a scorer failed with it for good, its attempt failed, nobody
rewards it) is replaced by another, as often as there may be rewards; then the version has had its
chance, and nobody waits any more.

The gate only decides; who acts on decisions acts on its own too (`version_control`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Literal

from sqlalchemy import Connection

from tracegrad.store import Decision, PolicyVersion, Store
from tracegrad.store.databases import statements
from tracegrad.store.read.held_out import (
    EvaluatedRollout,
    RewardWait,
    held_out_rollouts,
    traffic_rollouts,
)
from tracegrad.store.read.versions import VersionHistory, VersionRecord
from tracegrad_trainer.config.data import DataSettings
from tracegrad_trainer.config.promotion import PromotionSettings
from tracegrad_trainer.evaluation.sequential_test import Comparison, RewardSample, compare
from tracegrad_trainer.rewards.config import RewardSettings

GATE = "gate:held_out"
CANARY_GATE = "gate:canary"
# Of a version, for each of `max_rollouts`: what may be tried until it has a reward.
_TRIES = 2
_DONE = {"promote": "promoted", "rollback": "served again"}


@dataclass(slots=True)
class _Arm:
    """`lacking`: rollouts that will get no reward, by reason; `pending`: those that may yet."""

    rewards: RewardSample
    lacking: Counter[str] = field(default_factory=Counter)
    pending: int = 0

    def add(self, one: EvaluatedRollout) -> None:
        if one.reward is not None:
            self.rewards.add(one.reward)
        elif one.lacks is not None:
            self.lacking[one.lacks] += 1
        else:
            self.pending += 1

    def is_full(self, most: int) -> bool:
        """Whether it has `most` rewards, or too many of its rollouts will get none."""
        decided = self.rewards.count + self.lacking.total()
        return self.rewards.count >= most or decided >= _TRIES * most

    def takes_more(self, most: int) -> bool:
        """Whether more rollouts are to be tried."""
        tried = self.rewards.count + self.lacking.total() + self.pending
        return not self.is_full(most) and tried < _TRIES * most

    def describe_lacking(self) -> str:
        """`; 3 more get no reward: 2 scoring_failed, 1 no_reward`, or nothing."""
        if not self.lacking:
            return ""
        reasons = ", ".join(f"{count} {why}" for why, count in self.lacking.most_common())
        return f"; {self.lacking.total()} more get no reward: {reasons}"


@dataclass(frozen=True, slots=True)
class _Arms:
    candidate: _Arm
    baseline: _Arm
    mixed: int  # rollouts that other versions sampled too


class PromotionGate:
    """`data` and `rewards` are the run's: which rollouts a canary is judged by, what their reward
    is, and how long one may take. Whoever makes rollouts for the gate asks one of the same
    settings: what it does not count would be waited for for ever."""

    def __init__(
        self,
        settings: PromotionSettings,
        store: Store,
        *,
        data: DataSettings,
        rewards: RewardSettings,
    ) -> None:
        self._settings = settings
        self._store = store
        self._data = data
        self._rewards = rewards
        self._is_canary = settings.gate == "canary"

    def look(self, history: VersionHistory) -> str | None:
        """Decides what can be decided; why training is to wait, or None. Raises StoreError."""
        if history.serving is None:
            return None
        served = history.records[history.serving]
        if not served.kept:
            # Weights that are not on disk cannot be promoted. Where they will not be, training goes
            # on; `trainer versions` says why not.
            waiting = f"version {served.version} is being written to disk, to be promoted"
            return waiting if served.not_kept is None else None
        if history.promoted is None:
            why = "the first version: there is none to compare"
            return self._decide("promote", served.version, why)
        if history.same_weights(served.version, history.promoted):
            # A canary's baseline comes with it.
            return None if self._is_canary else self._gather_baseline(history)
        return None if served.evaluation is not None else self._evaluate(history, served)

    def gathers(self, history: VersionHistory) -> int | None:
        """The version that held-out rollouts are wanted of now; None: there is none. Raises
        StoreError."""
        if history.serving is None or history.promoted is None:
            return None
        served = history.records[history.serving]
        if not served.kept:
            return None
        is_baseline = history.same_weights(served.version, history.promoted)
        if served.evaluation is not None and not is_baseline:
            return None
        arms = self._arms(history, served.version)
        arm = arms.baseline if is_baseline else arms.candidate
        return served.version if arm.takes_more(self._settings.max_rollouts) else None

    def _gather_baseline(self, history: VersionHistory) -> str | None:
        assert history.promoted is not None
        promoted = history.promoted
        found = self._arms(history, promoted).baseline
        wanted = self._settings.max_rollouts
        if found.is_full(wanted):
            return None
        return (
            f"version {promoted} is promoted, and gathers held-out rollouts to compare the next one"
            f" with: {found.rewards.count} of {wanted} ({self._where()}){found.describe_lacking()}"
        )

    def _evaluate(self, history: VersionHistory, served: VersionRecord) -> str | None:
        settings = self._settings
        arms = self._arms(history, served.version)
        candidate = arms.candidate
        found = compare(candidate.rewards, arms.baseline.rewards, settings.alpha)
        if found.verdict == "inconclusive" and not candidate.is_full(settings.max_rollouts):
            return (
                f"version {served.version} is evaluated: {candidate.rewards.count} of at most"
                f" {settings.max_rollouts} {self._what} ({self._where()})"
                f"{candidate.describe_lacking()}"
            )
        detail = asdict(found) | {
            "baseline": history.promoted,
            "mixed": arms.mixed,
            "lacking": dict(candidate.lacking),
        }
        self._store.note_version(
            PolicyVersion(served.version, served.step, "evaluated", detail=detail)
        )
        said = describe(found, history.promoted, self._what) + candidate.describe_lacking()
        # Of which nothing is known at all is not promoted.
        promotes = settings.inconclusive == "promote" and candidate.rewards.count > 0
        if found.verdict == "regressed":
            assert history.promoted is not None
            return self._decide("rollback", history.promoted, f"version {served.version} {said}")
        if found.verdict == "improved" or promotes:
            return self._decide("promote", served.version, said)
        return None

    def _arms(self, history: VersionHistory, candidate: int) -> _Arms:
        assert history.promoted is not None
        baseline = set(history.numbers_of(history.promoted))
        numbers = set(history.numbers_of(candidate)) - baseline
        of_candidate, of_baseline, mixed = self._arm(), self._arm(), 0
        since = history.records[candidate].created_at if self._is_canary else history.promoted_at
        with self._store.reading() as connection:
            found = self._rollouts(connection, baseline | numbers)
        for one in found:
            if one.versions <= numbers:
                of_candidate.add(one)
            elif not one.versions <= baseline:
                mixed += 1
            elif one.finished_at >= since:
                of_baseline.add(one)
        return _Arms(of_candidate, of_baseline, mixed)

    def _arm(self) -> _Arm:
        return _Arm(RewardSample(self._settings.reward_low, self._settings.reward_high))

    def _rollouts(
        self, connection: Connection, versions: Collection[int]
    ) -> list[EvaluatedRollout]:
        composed = self._rewards.composes
        if self._is_canary:
            return traffic_rollouts(connection, self._data.tags, versions, composed=composed)
        before = statements.server_time(connection) - self._data.incomplete_after_s
        wait = RewardWait(scorers=self._rewards.scorers, no_reward_before=before)
        tags = self._settings.tags
        return held_out_rollouts(connection, tags, versions, composed=composed, wait=wait)

    @property
    def _what(self) -> str:
        return "rollouts of its share" if self._is_canary else "held-out rollouts"

    def _where(self) -> str:
        if self._is_canary:
            return f"promotion.canary_share = {self._settings.canary_share:g}"
        return " ".join(f"{key}={value}" for key, value in self._settings.tags.items())

    def _decide(self, kind: Literal["promote", "rollback"], version: int, why: str) -> str:
        """Why training is to wait until that is done: a step made meanwhile would be served before
        the promoted version's own rollouts are gathered."""
        training = self._settings.regressed if kind == "rollback" else None
        self._store.decide(
            Decision(
                kind=kind,
                version=version,
                training=training,
                by=CANARY_GATE if self._is_canary else GATE,
                reason=why,
            )
        )
        return f"version {version} is about to be {_DONE[kind]}: {why}"


def describe(found: Comparison, baseline: int | None, what: str = "held-out rollouts") -> str:
    """`improved on version 3: 0.61 against 0.48 (difference 0.02 to 0.31 ...)`"""
    words = {
        "improved": f"improved on version {baseline}",
        "regressed": f"regressed from version {baseline}",
        "inconclusive": f"is not told from version {baseline}",
    }
    means = [
        "none" if mean is None else f"{mean:.3g} of {n}"
        for mean, n in (
            (found.mean_candidate, found.n_candidate),
            (found.mean_baseline, found.n_baseline),
        )
    ]
    low, high = found.difference
    return (
        f"{words[found.verdict]}: {means[0]} {what} against {means[1]}, difference"
        f" {low:+.3g} to {high:+.3g}, e-values {found.e_improved:.3g} improved and"
        f" {found.e_regressed:.3g} regressed, alpha {found.alpha:g}"
    )

"""The gate: a version is a candidate until its rollouts say what it is: held-out ones, or those of
a share of traffic (canary).

One engine serves one version at a time, so a comparison is of rollouts that were sampled one after
the other: those of the promoted version since it was promoted, and those of the candidate. The
promoted one's own as a candidate do not count again: it was promoted because they were good, and
whatever came after it would seem worse. Training waits while either arm is gathered: what is
sampled meanwhile is of the weights that go on training, and nothing of it becomes stale.

With a canary two versions are served at once, each to rollouts of its own. Their rollouts are
compared that ended since the candidate was pushed, so that both arms saw the same traffic.

The gate only decides; who acts on decisions acts on its own too (`version_control`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import Connection

from tracegrad.store import Decision, PolicyVersion, Store
from tracegrad.store.read.held_out import (
    EvaluatedRollout,
    held_out_rollouts,
    traffic_rollouts,
)
from tracegrad.store.read.versions import VersionHistory, VersionRecord
from tracegrad_trainer.config.promotion import PromotionSettings
from tracegrad_trainer.evaluation.sequential_test import Comparison, RewardSample, compare

GATE = "gate:held_out"
CANARY_GATE = "gate:canary"


@dataclass(frozen=True, slots=True)
class _Arms:
    candidate: RewardSample
    baseline: RewardSample
    mixed: int  # rollouts that other versions sampled too


class PromotionGate:
    """`tags`: of the rollouts that training takes, which a canary is judged by. `composed`: whether
    their rewards, and those of held-out ones, are sums (`latest_reward`)."""

    def __init__(
        self,
        settings: PromotionSettings,
        store: Store,
        *,
        tags: Mapping[str, str] | None = None,
        composed: bool = False,
    ) -> None:
        self._settings = settings
        self._store = store
        self._tags = tags or {}
        self._composed = composed
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
            self._decide("promote", served.version, "the first version: there is none to compare")
            return None
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
        if history.same_weights(served.version, history.promoted):
            found = self._arms(history, history.promoted).baseline.count
            return served.version if found < self._settings.max_rollouts else None
        return None if served.evaluation is not None else served.version

    def _gather_baseline(self, history: VersionHistory) -> str | None:
        assert history.promoted is not None
        promoted = history.promoted
        found = self._arms(history, promoted).baseline.count
        wanted = self._settings.max_rollouts
        if found >= wanted:
            return None
        return (
            f"version {promoted} is promoted, and gathers held-out rollouts to compare the next one"
            f" with: {found} of {wanted} ({self._where()})"
        )

    def _evaluate(self, history: VersionHistory, served: VersionRecord) -> str | None:
        settings = self._settings
        arms = self._arms(history, served.version)
        found = compare(arms.candidate, arms.baseline, settings.alpha)
        is_over = arms.candidate.count >= settings.max_rollouts
        if found.verdict == "inconclusive" and not is_over:
            return (
                f"version {served.version} is evaluated: {arms.candidate.count} of at most"
                f" {settings.max_rollouts} {self._what} ({self._where()})"
            )
        detail = asdict(found) | {"baseline": history.promoted, "mixed": arms.mixed}
        self._store.note_version(
            PolicyVersion(served.version, served.step, "evaluated", detail=detail)
        )
        said = describe(found, history.promoted, self._what)
        if found.verdict == "regressed":
            assert history.promoted is not None
            self._decide("rollback", history.promoted, f"version {served.version} {said}")
        elif found.verdict == "improved" or settings.inconclusive == "promote":
            self._decide("promote", served.version, said)
        return None

    def _arms(self, history: VersionHistory, candidate: int) -> _Arms:
        assert history.promoted is not None
        baseline = set(history.numbers_of(history.promoted))
        numbers = set(history.numbers_of(candidate)) - baseline
        of_candidate, of_baseline, mixed = self._sample(), self._sample(), 0
        since = history.records[candidate].created_at if self._is_canary else history.promoted_at
        with self._store.reading() as connection:
            found = self._rollouts(connection, baseline | numbers)
        for one in found:
            if one.versions <= numbers:
                of_candidate.add(one.reward)
            elif not one.versions <= baseline:
                mixed += 1
            elif one.finished_at >= since:
                of_baseline.add(one.reward)
        return _Arms(of_candidate, of_baseline, mixed)

    def _sample(self) -> RewardSample:
        return RewardSample(self._settings.reward_low, self._settings.reward_high)

    def _rollouts(
        self, connection: Connection, versions: Collection[int]
    ) -> list[EvaluatedRollout]:
        if self._is_canary:
            return traffic_rollouts(connection, self._tags, versions, composed=self._composed)
        return held_out_rollouts(connection, self._settings.tags, versions, composed=self._composed)

    @property
    def _what(self) -> str:
        return "rollouts of its share" if self._is_canary else "held-out rollouts"

    def _where(self) -> str:
        if self._is_canary:
            return f"promotion.canary_share = {self._settings.canary_share:g}"
        return " ".join(f"{key}={value}" for key, value in self._settings.tags.items())

    def _decide(self, kind: Literal["promote", "rollback"], version: int, why: str) -> None:
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

"""Guards at work: reads what a batch's rollouts did, and has training paused, or a version rolled
back, before the batch is trained (`guards.action`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tracegrad.events import Json, Turn
from tracegrad.store import Decision, Group, Store
from tracegrad.store.read.turns import load_turns
from tracegrad.store.types import RolloutSample
from tracegrad_trainer.guards import Alarm, DriftGuards, GuardSettings
from tracegrad_trainer.guards.behaviour import behaviour_of
from tracegrad_trainer.guards.drift import ObservedRollout

logger = logging.getLogger(__name__)

# Of turns that a guard kept from being trained (`inspect.reasons`).
DRIFT_GUARD = "drift_guard"


class DriftWatch:
    """`state` moves with the batches that are trained, as advantages' memory does."""

    def __init__(self, settings: GuardSettings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._guards = DriftGuards(settings)
        self._alarms = 0  # since the last step

    def stops(self, groups: Sequence[Group]) -> bool:
        """Whether these must not be trained; who asked for that has then been told. Raises
        StoreError."""
        return self._act(self._guards.observe([self._seen(group.rollouts) for group in groups]))

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """A step that was made; the next one may not be. Raises StoreError."""
        self._act(self._guards.check_step(metrics.get("entropy"), metrics.get("kl_reference")))

    def take_stats(self) -> dict[str, float]:
        """For the metrics of a step."""
        alarms, self._alarms = self._alarms, 0
        shares = self._guards.shares().values()
        return {"drift_alarms": float(alarms), "drift_evidence": max(shares, default=0.0)}

    def state(self) -> Json:
        return self._guards.state()

    def restore(self, state: Json) -> None:
        self._guards.restore(state)

    def _seen(self, rollouts: Sequence[RolloutSample]) -> list[ObservedRollout]:
        # Leased turns come without their requests, which the store keeps as differences.
        with self._store.reading() as connection:
            turns = load_turns(
                connection, [one.rollout_id for one in rollouts], expert_routing=False
            )
        return [self._observed(one, turns[one.rollout_id]) for one in rollouts]

    def _observed(self, rollout: RolloutSample, turns: Sequence[Turn]) -> ObservedRollout:
        versions = [version for turn in rollout.turns for version, _ in turn.policy_versions]
        behaviour = behaviour_of(turns, self._settings.refusals)
        return ObservedRollout(behaviour, max(versions, default=0), rollout.reward)

    def _act(self, alarms: Sequence[Alarm]) -> bool:
        if not alarms:
            return False
        self._alarms += len(alarms)
        for alarm in alarms:
            logger.warning("drift guard: %s", alarm.message)
        if self._settings.action == "warn":
            return False
        by = "guard:" + ",".join(alarm.signal for alarm in alarms)
        reason = "; ".join(alarm.message for alarm in alarms)
        # Paused in any case: a rollback may be refused, where no earlier version is kept.
        self._store.decide(Decision(kind="pause", by=by, reason=reason))
        if self._settings.action == "rollback":
            good = [alarm.last_good for alarm in alarms if alarm.last_good is not None]
            version = min(good, default=None)
            self._store.decide(
                Decision(kind="rollback", version=version, training="pause", by=by, reason=reason)
            )
        return True

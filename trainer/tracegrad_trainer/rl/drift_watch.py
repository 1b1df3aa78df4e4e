"""Guards at work: reads what rollouts did, of a batch before it is trained and of those that nobody
rewards, and has training paused, or a version rolled back (`guards.action`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from tracegrad.events import Json, Turn
from tracegrad.store import Decision, Group, Store
from tracegrad.store.read.turns import load_turns
from tracegrad.store.types import RolloutSample
from tracegrad_trainer.batches.version_scale import RolledBackVersions, is_within
from tracegrad_trainer.guards import Alarm, DriftGuards, GuardSettings
from tracegrad_trainer.guards.behaviour import behaviour_of
from tracegrad_trainer.guards.drift import ObservedRollout
from tracegrad_trainer.rl.unrewarded_rollouts import UnrewardedRollouts

logger = logging.getLogger(__name__)

# Of turns that a guard kept from being trained (`inspect.reasons`).
DRIFT_GUARD = "drift_guard"
_BY = "guard:"  # signals follow, who decides


class DriftWatch:
    """`state` moves with the batches that are trained, as advantages' memory does."""

    def __init__(
        self, settings: GuardSettings, store: Store, unrewarded: UnrewardedRollouts | None = None
    ) -> None:
        """`unrewarded`: those that are watched beside the ones of batches.

        By guards of their own: they come later than those with a reward, and of two streams in
        turn, one ahead of the other, no rise has a beginning."""
        self._settings = settings
        self._store = store
        self._unrewarded = unrewarded
        self._guards = DriftGuards(settings)
        self._unrewarded_guards = DriftGuards(settings, what="rollouts without a reward")
        self._alarms = 0  # since the last step
        self._since: float | None = None  # what was decided by then is known
        self._stopped: frozenset[str] = frozenset()  # rollouts of the last alarm, if not consumed

    def stops(self, groups: Sequence[Group]) -> bool:
        """Whether these must not be trained; who asked for that has then been told. Raises
        StoreError."""
        fresh = [[one for one in group.rollouts if not self._was_seen(one)] for group in groups]
        rewards = [{one.rollout_id: one.reward for one in rollouts} for rollouts in fresh]
        if not self._observe(self._guards, [each for each in rewards if each]):
            return False
        if not self.consumes:
            ids = (one.rollout_id for group in groups for one in group.rollouts)
            self._stopped = frozenset(ids)  # to be let through next time
        return True

    def stops_unrewarded(self) -> bool:
        """Whether nothing must be trained because of rollouts that nobody rewarded. Raises
        StoreError."""
        if self._unrewarded is None:
            return False
        found = self._unrewarded.take()
        read = self._read([dict.fromkeys(one.rollout_id for one in group) for group in found])
        fresh = []
        for group, observed in zip(found, read, strict=True):
            versions = (one.version for one in observed)
            new = self._unrewarded.new_versions(group[0].task_id, versions)
            fresh.append([one for one in observed if one.version in new])
        return self._act(self._unrewarded_guards.observe([each for each in fresh if each]))

    def let_go_on(self) -> None:
        """Training was held, and is not any more: signals that somebody let go on begin with new
        baselines, also where a trainer of before the hold raised the alarm. Raises StoreError."""
        if self._since is None:
            return
        signals, self._since = self._let_go_on(self._since)
        for each in self._both:
            each.forget(signals)

    def check_step(self, metrics: Mapping[str, float]) -> bool:
        """Whether nothing must be trained after the step that was made. Raises StoreError."""
        alarms = self._guards.check_step(metrics.get("entropy"), metrics.get("kl_reference"))
        return self._act(alarms)

    def take_stats(self) -> dict[str, float]:
        """For the metrics of a step."""
        alarms, self._alarms = self._alarms, 0
        shares = [share for each in self._both for share in each.shares().values()]
        if alarms:
            shares.append(1.0)  # of detectors that begin anew by now
        return {"drift_alarms": float(alarms), "drift_evidence": max(shares, default=0.0)}

    def state(self) -> Json:
        state = self._guards.state() | {"at": time.time()}
        if self._unrewarded is not None:
            guards = {"guards": self._unrewarded_guards.state()}
            state["unrewarded"] = self._unrewarded.state() | guards
        return state

    def restore(self, state: Json) -> None:
        """Raises StoreError."""
        self._guards.restore(state)
        if self._unrewarded is not None and "unrewarded" in state:
            self._unrewarded.restore(state["unrewarded"])
            self._unrewarded_guards.restore(state["unrewarded"]["guards"])
        self._since = state.get("at")
        self.let_go_on()

    def good_versions(self) -> set[int]:
        """That must stay on disk, or the newest ones before them: a rollback may go there."""
        if self._settings.action != "rollback":
            return set()
        return {version for each in self._both for version in each.good_versions()}

    @property
    def consumes(self) -> bool:
        """Whether what was stopped is not to be trained later either: the policy that sampled it
        is given up."""
        return self._settings.action == "rollback"

    @property
    def _both(self) -> tuple[DriftGuards, DriftGuards]:
        return self._guards, self._unrewarded_guards

    def _was_seen(self, rollout: RolloutSample) -> bool:
        if rollout.rollout_id in self._stopped:
            return True
        return self._unrewarded is not None and self._unrewarded.was_given(rollout.rollout_id)

    def _let_go_on(self, since: float) -> tuple[set[str], float]:
        """Signals of alarms since then after which somebody let training go on as it was, and when
        that was last decided: an alarm that nobody has answered yet is asked for again. A rollback
        takes what is usual back to what it was, with the weights."""
        answered = since
        asked: set[str] = set()
        found: set[str] = set()
        for one in self._store.decisions():
            if one.created_at <= since or one.refused is not None:
                continue
            if one.kind == "pause" and one.by.startswith(_BY):
                asked |= set(one.by.removeprefix(_BY).split(","))
            elif one.kind == "resume":
                found |= asked
                asked, answered = set(), one.created_at
            elif one.kind == "rollback":
                asked, found, answered = set(), set(), one.created_at
        return found, answered

    def _observe(self, guards: DriftGuards, groups: Sequence[Mapping[str, float | None]]) -> bool:
        """Rewards by rollout id, of groups."""
        return self._act(guards.observe([each for each in self._read(groups) if each]))

    def _read(
        self, groups: Sequence[Mapping[str, float | None]]
    ) -> Iterator[list[ObservedRollout]]:
        """Group by group, without rollouts of versions that a rollback gave up: nothing of them is
        trained, and a guard has seen what they did, or would have gone back from it once more."""
        rolled_back = self._store.rolled_back_versions()
        for rewards in groups:
            # Leased turns come without their requests, which the store keeps as differences.
            with self._store.reading() as connection:
                turns = load_turns(connection, list(rewards), expert_routing=False)
            found = ((turns[name], reward) for name, reward in rewards.items())
            yield [self._observed(*one) for one in found if not _has_one_of(rolled_back, one[0])]

    def _observed(self, turns: Sequence[Turn], reward: float | None) -> ObservedRollout:
        behaviour = behaviour_of(turns, self._settings.refusals)
        return ObservedRollout(behaviour, max(_versions_of(turns), default=0), reward)

    def _act(self, alarms: Sequence[Alarm]) -> bool:
        if not alarms:
            return False
        self._alarms += len(alarms)
        for alarm in alarms:
            logger.warning("drift guard: %s", alarm.message)
        if self._settings.action == "warn":
            return False
        by = _BY + ",".join(alarm.signal for alarm in alarms)
        reason = "; ".join(alarm.message for alarm in alarms)
        # Paused in any case: a rollback may be refused, where no earlier version is kept.
        self._store.decide(Decision(kind="pause", by=by, reason=reason))
        if self._settings.action == "rollback":
            decision = Decision(
                kind="rollback",
                version=self._version_before(alarms),
                training="pause",
                by=by,
                reason=reason,
            )
            self._store.decide(decision)
        return True

    def _version_before(self, alarms: Sequence[Alarm]) -> int | None:
        """The newest on disk from before all drifts. None: nobody knows when they began."""
        good = [alarm.last_good for alarm in alarms if alarm.last_good is not None]
        if not good:
            return None
        kept = self._store.version_history().kept_before(min(good))
        return min(good) if kept is None else kept  # which is refused, with what there is


def _versions_of(turns: Sequence[Turn]) -> set[int]:
    return {version for turn in turns for version, _ in turn.policy_versions}


def _has_one_of(ranges: RolledBackVersions, turns: Sequence[Turn]) -> bool:
    return any(is_within(version, ranges) for version in _versions_of(turns))

"""What rank 0 does besides its share of a step: the ledger's side of training.

It leases finished groups, selects what may be trained, and commits each step together with
exactly the turns it used. Nothing here touches the model.
"""

from __future__ import annotations

import copy
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from tracegrad.events import Json, Turn
from tracegrad.store import (
    AlreadyTrained,
    Group,
    LeaseLost,
    Ledger,
    StepCommit,
    StepHistory,
    StepRecord,
    Store,
    lease_by_rollout,
)
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad.store.read.versions import VersionRecord
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches import PackingRule, TrainingSelection, select
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.version_scale import RolledBackVersions, SkippedVersions
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.checkpoint.manifest import checkpoint_step, read_manifest
from tracegrad_trainer.launch.run_state import run_id
from tracegrad_trainer.losses import AdvantageMemory, compute_advantages
from tracegrad_trainer.rl.build_learner import engine_routing_layout
from tracegrad_trainer.rl.committed_checkpoint import (
    CommittedCheckpoint,
    checkpoint_of_step,
    resume_checkpoint,
)
from tracegrad_trainer.rl.crash_reward import CrashReward
from tracegrad_trainer.rl.drift_watch import DRIFT_GUARD, DriftWatch
from tracegrad_trainer.rl.idle_rollouts import IdleRollouts
from tracegrad_trainer.rl.intake_report import IntakeReport, over_sample_of
from tracegrad_trainer.rl.lease_renewal import HeldLeases
from tracegrad_trainer.rl.reward_judge import RewardJudge
from tracegrad_trainer.rl.selection_watch import SelectionWatch
from tracegrad_trainer.rl.step_inputs import StepInputs
from tracegrad_trainer.rl.unrewarded_rollouts import UnrewardedRollouts

logger = logging.getLogger(__name__)

POLL_S = 0.2
# Groups that are held while a batch is refilled, at most this many times those it needs: where
# nearly every group has equal rewards, it goes on with fewer.
MAX_REFILLS = 8
_GIVEN_BACK = "given_back"  # turns, by the selection that has fitted nothing


@dataclass(frozen=True, slots=True)
class RolloutSupply:
    """Whether more rollouts are to be expected, and how long one call waits for them: the other
    ranks sit in a collective meanwhile."""

    is_open: bool = True
    patience_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch:
    """Leased groups, and what of them is trained by policy version `version`."""

    groups: list[Group]
    selection: TrainingSelection
    version: int
    failed_versions: list[int]
    rolled_back_versions: RolledBackVersions = ()
    memory_before: AdvantageMemory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    step: int
    version: int  # the number that the checkpoint's weights are served under
    weights: CommittedCheckpoint | None  # None: the model folder's
    skipped: SkippedVersions = ()  # numbers between theirs and `version`, and of resumes before
    rolled_back: bool = False  # the last committed step's weights were given up


class Coordinator:
    def __init__(
        self,
        settings: TrainerSettings,
        store: Store,
        *,
        stopping: Callable[[], bool],
        supply: RolloutSupply | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: how many tokens the model knows.

        Raises:
            ValueError: there is no such judge; the model has no experts to route to (r3).
        """
        self.settings = settings
        self.store = store
        self.ledger = Ledger(store)
        self.stopping = stopping
        self.supply = supply or RolloutSupply()
        self.vocabulary = vocabulary
        self.routing = engine_routing_layout(settings)
        # What advantages remember. It moves only with steps: what a batch did that changed no
        # weights must leave no trace, or a run that is killed and resumed would differ.
        self.memory: AdvantageMemory = {}
        self.skipped_versions: SkippedVersions = ()
        # Around each commit of steps; raises where they must not be committed any more.
        self.committing: Callable[[], AbstractContextManager[None]] = nullcontext
        judge = settings.objective.judge
        self.judging = None if judge is None else RewardJudge(judge, store)
        crashed = settings.rewards.agent_error
        tags = settings.data.tags
        held_out = settings.promotion.held_out
        self.crash_reward = None if crashed is None else CrashReward(store, crashed, tags, held_out)
        idle_s = settings.data.idle_s
        self.idle_rollouts = None if idle_s is None else IdleRollouts(self.ledger, idle_s, tags)
        watched = settings.guards.action != "off"
        self.drift = DriftWatch(settings.guards, store, self._unrewarded()) if watched else None
        self._alarmed = False  # by a guard, since training was let go on
        self.run_id = run_id(settings.state_dir)
        # The same after a restart: what a killed trainer had leased is its own again.
        self.owner = f"{socket.gethostname()}:{settings.state_dir}:{self.run_id}"
        self.leases = HeldLeases(self.ledger, settings.data.lease_ttl_s)
        # Where no more are to come there is nobody to ask for them.
        asks = self.supply.is_open
        self.intake = IntakeReport(settings, store, self.owner) if asks else None
        self._held: list[Group] = []
        self.selection = SelectionWatch(settings.batches, looks_again=self.supply.is_open)
        self._rewards_seen = store.late_rewards().last  # by number of arrival
        _, self._scorings_seen = store.count_scorings()  # as well

    def resume_point(self) -> ResumePoint:
        """Where the last committed step left off; what a killed run of ours had is free again."""
        self.ledger.release_owner(self.owner)
        point = resume_point(self.settings, self.store)
        self.skipped_versions = point.skipped
        logger.info(describe_resume(point, self.settings))
        if point.weights is not None:
            self._log_origin(point.weights)
        return point

    def _log_origin(self, weights: CommittedCheckpoint) -> None:
        if weights.digest is None:
            logger.warning(
                "step %d was committed before steps kept their checkpoint's digest: whether %s is"
                " its checkpoint cannot be verified",
                weights.step,
                weights.folder,
            )
        elif weights.run_id != self.run_id:
            logger.warning(
                "going on from step %d, which run %s made, with its checkpoint %s",
                weights.step,
                weights.run_id,
                weights.folder,
            )

    def next_batch(
        self, version: int, *, interrupted: Callable[[], bool] = lambda: False
    ) -> LeasedBatch | None:
        """The next batch, or None when nothing was ready for `RolloutSupply.patience_s`, when
        `interrupted`, or when a batch was given back.

        Groups from which nothing can be trained are consumed here, with their reasons, and cost
        no step. They are given back where the selection has fitted nothing so far.
        """
        deadline = time.monotonic() + self.supply.patience_s
        while not self.stopping() and not self._alarm_of_unrewarded():
            more = self._lease()
            self._held += more
            if more:
                self._report_useless()
            if self._held and (self._full() or not (more or self.supply.is_open)):
                batch = self._batch(version)
                if batch is not None or (self.supply.is_open and self.selection.groups):
                    return batch
            elif not more:
                if not self.supply.is_open or interrupted() or time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
        return None

    def _report_useless(self) -> None:
        """To drivers: groups in whose place they may open others."""
        if self.intake is not None:
            equal = sum(map(has_equal_rewards, self._held)) if self.settings.refills else 0
            self.intake.set_useless(equal + self.selection.groups)

    def _full(self) -> bool:
        return self._missing() == 0 or len(self._held) >= MAX_REFILLS * self.settings.batches.groups

    def _missing(self) -> int:
        """How many groups the batch under way still needs."""
        wanted = self.settings.batches.groups
        if not self.settings.refills:
            return max(0, wanted - len(self._held))
        return max(0, wanted - sum(not has_equal_rewards(group) for group in self._held))

    def _lease(self) -> list[Group]:
        batches, data = self.settings.batches, self.settings.data
        missing = self._missing()
        if not missing:
            return []
        # Where no more are to come, and where some are held already, fewer will do.
        some = bool(self._held) or not self.supply.is_open
        patience_s = data.incomplete_after_s if self.supply.is_open else 0.0
        if self.idle_rollouts is not None:
            if self.supply.is_open:
                self.idle_rollouts.close_some()
            else:
                self.idle_rollouts.close_all()
        if self.crash_reward is not None:
            self.crash_reward.apply(patience_s)
        groups = self.ledger.lease(
            groups=missing,
            group_size=batches.group_size,
            owner=self.owner,
            ttl_s=data.lease_ttl_s,
            tags=data.tags,
            incomplete_after_s=patience_s,
            at_least=1 if some else None,
            expert_routing=self.routing is not None,
            held={*self.leases.rollouts, *self.selection.held_back()},
            over_sample=over_sample_of(self.settings),
            composed=self.settings.rewards.composes,
            held_out=self.settings.promotion.held_out,
        )
        self.leases.hold(groups)  # a judge may take its time
        return self.judging.apply(groups) if self.judging else groups

    def _batch(self, version: int) -> LeasedBatch | None:
        """Of the groups that are held; None if nothing of them can be trained."""
        groups = self._held
        self._held = self._still_ours(groups)
        if len(self._held) < len(groups):
            return None  # it is filled up again
        scopes = turn_scopes_of(groups, self.store, self.settings.batches)
        if self._selects_nothing(groups, scopes):
            self._held = []
            self._let_go(groups)
            self.selection.set_aside(groups)
            self._report_useless()
            return None
        if self.drift is not None and self.drift.stops(groups):
            self._held = []
            self._alarmed = True
            if self.drift.consumes:
                self._consume(groups, _every_turn(groups, DRIFT_GUARD))
            else:
                self._let_go(groups)  # trained when somebody lets training go on
            return None
        before = copy.deepcopy(self.memory)
        failed, rolled_back = self.store.failed_versions(), self.store.rolled_back_versions()
        selection = select(
            groups,
            self.settings.batches,
            advantages=partial(compute_advantages, self.settings.objective, memory=self.memory),
            current_version=version,
            failed_versions=failed,
            skipped_versions=self.skipped_versions,
            rolled_back_versions=rolled_back,
            vocabulary=self.vocabulary,
            routing=self.routing,
            scopes=scopes,
        )
        self._held = []  # only now: what cannot be selected from is released
        if selection.trained:
            return LeasedBatch(
                groups=groups,
                selection=selection,
                version=version,
                failed_versions=failed,
                rolled_back_versions=rolled_back,
                memory_before=before,
            )
        self.memory = before
        self._consume(groups, selection.skipped)
        return None

    def _selects_nothing(self, groups: Sequence[Group], scopes: Mapping[str, TurnScope]) -> bool:
        """Whether nothing was ever selected, for want of a pattern that fits. Each pattern that
        fits nothing is said once."""
        for each in self.selection.look(turns_of(groups), scopes):
            logger.warning("%s", each)
        return self.selection.selects_nothing

    def _still_ours(self, groups: Sequence[Group]) -> list[Group]:
        """Without those that were lost since they were leased, all of whose rollouts are let go."""
        lost = self.leases.lost_rollouts(groups)
        if not lost:
            return list(groups)
        gone = {each.rollout_id for each in lost}
        ours: list[Group] = []
        others: list[Group] = []
        for group in groups:
            whole = gone.isdisjoint(rollout.rollout_id for rollout in group.rollouts)
            (ours if whole else others).append(group)
        logger.warning(
            f"{len(others)} of {len(groups)} groups are left out of the batch: {lost[0]}"
        )
        self._let_go(others)
        return ours

    def _consume(self, groups: Sequence[Group], skipped: dict[str, str]) -> None:
        """Without a step. What is another's by now is left to them."""
        rollouts = [rollout.rollout_id for group in groups for rollout in group.rollouts]
        try:
            self.ledger.commit_skipped(skipped, rollouts, lease_by_rollout(groups))
        except (LeaseLost, AlreadyTrained) as error:
            logger.warning("a batch that nothing can be trained of is left to others: %s", error)
            self._let_go(groups)
        self.leases.drop(groups)

    def _let_go(self, groups: Sequence[Group]) -> None:
        self.ledger.release(groups)
        self.leases.drop(groups)

    def record(
        self,
        batch: LeasedBatch,
        *,
        step: int,
        version: int,
        metrics: Json,
        dropped_rows: Collection[int],
        weights: int,
        packing: PackingRule | None = None,
        momentum_cleared: bool = False,
    ) -> StepCommit:
        """The step as the ledger is to have it, less what is known of its checkpoint later.
        `weights`: of which step it began with. `packing`: as its rows were."""
        selection = batch.selection.without_rows(dropped_rows, "non_finite")
        inputs = StepInputs.of(
            batch.groups,
            version=batch.version,
            failed_versions=batch.failed_versions,
            skipped_versions=self.skipped_versions,
            rolled_back_versions=batch.rolled_back_versions,
            ranks=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            threads=torch.get_num_threads(),
            memory_before=batch.memory_before,
            dropped_rows=sorted(dropped_rows),
            weights=weights,
            packing=packing,
            momentum_cleared=momentum_cleared,
        )
        made = StepRecord(
            step=step,
            version=version,
            settings=self.settings.stored(),
            metrics={
                **selection.stats,
                **self._late_rewards(),
                **self._scorings(),
                **({} if self.intake is None else self.intake.metrics()),
                **self._drift(metrics),
                **metrics,
            },
            batch=inputs.model_dump(mode="json"),
            run_id=self.run_id,
        )
        return StepCommit(
            step=made,
            trained=selection.trained,
            skipped=selection.skipped,
            rollouts=selection.rollouts,
            leases=lease_by_rollout(batch.groups),
            advantages=self._advantages(selection),
        )

    def _advantages(self, selection: TrainingSelection) -> dict[str, float]:
        """Of the turns that were trained; GAE's are the tokens' own, and come of a forward."""
        if self.settings.objective.advantage == "gae":
            return {}
        return {turn_id: selection.advantages[turn_id] for turn_id in selection.trained}

    def commit(self, commits: Sequence[StepCommit], groups: Sequence[Group]) -> None:
        """The steps and exactly their turns, in one transaction; `groups` is all they had leased.

        Raises:
            LedgerError: a turn or a lease is another's by now, or a step's number is; then
                nothing is stored.
        """
        with self.committing():
            self.ledger.commit_steps(commits)
        self.leases.drop(groups)

    def is_committed(self, folder: Path) -> bool:
        """Whether a folder is the checkpoint of a committed step, and not one of its name."""
        step = StepHistory(self.store).step(checkpoint_step(folder))
        if step is None or step.checkpoint is None:
            return False
        try:
            return step.manifest_digest in (None, manifest_digest(folder))
        except OSError:  # it is damaged
            return False

    def counters(self, version: int) -> Json:
        """What a checkpoint keeps beside the weights, which are of `version`."""
        return {
            "version": version,
            "memory": self.memory,
            "skipped_versions": list(self.skipped_versions),
            "drift": None if self.drift is None else self.drift.state(),
        }

    def restore_counters(self, counters: Json) -> None:
        """As `counters` said when the checkpoint was written; those of before guards lack them."""
        self.memory = counters["memory"]
        if self.drift is not None and (kept := counters.get("drift")) is not None:
            self.drift.restore(kept)

    def _drift(self, metrics: Json) -> dict[str, float]:
        if self.drift is None:
            return {}
        self._alarmed |= self.drift.check_step(metrics)
        return self.drift.take_stats()

    def _unrewarded(self) -> UnrewardedRollouts | None:
        """None where what is in the store is all there is: nobody waits for a reward."""
        if not self.supply.is_open:
            return None
        settings = self.settings
        return UnrewardedRollouts(
            self.store,
            settings.data.tags,
            settings.data.incomplete_after_s,
            composed=settings.rewards.composes,
            held_out=settings.promotion.held_out,
        )

    def _alarm_of_unrewarded(self) -> bool:
        """Whether a guard stands in the way, also because of what nobody rewards."""
        if not self._alarmed and self.drift is not None:
            self._alarmed = self.drift.stops_unrewarded()
        return self._alarmed

    def _late_rewards(self) -> dict[str, float]:
        """Those that came since the step before, and after training of their rollouts."""
        found = self.store.late_rewards(after=self._rewards_seen)
        self._rewards_seen = found.last
        return {"rewards_after_training": float(found.rewards)}

    def report_served(self, version: int, made: Sequence[Group], *, stepped: bool) -> None:
        """To drivers: the weights of `version` are served; `made` are groups of steps that are not
        committed. `stepped`: by a step of just now."""
        if self.intake is not None:
            self.intake.update(version=version, made=made, stepped=stepped)

    def close(self) -> None:
        """Nothing is renewed any more."""
        self.leases.close()
        if self.intake is not None:
            self.intake.close()

    def _scorings(self) -> dict[str, float]:
        """How scorers ended with rollouts since the step before."""
        counts, self._scorings_seen = self.store.count_scorings(after=self._scorings_seen)
        found: dict[str, float] = {}
        for name, each in counts.items():
            found[f"scored_{name}"] = float(each.scored)
            found[f"score_unknown_{name}"] = float(each.unknown)
            found[f"score_failed_{name}"] = float(each.failed)
            found[f"score_seconds_{name}"] = each.seconds
        return found

    def check_leases(self, batch: LeasedBatch) -> None:
        """That all of the batch is still ours; it is renewed. Raises LeaseLost."""
        if lost := self.leases.lost_rollouts(batch.groups):
            raise LeaseLost(f"{lost[0]}; nothing of the step is kept: start again to go on")

    def discard_batch(self, batch: LeasedBatch, reason: str) -> None:
        """Consumes a batch whose step did not change the weights."""
        self.memory = copy.deepcopy(batch.memory_before)
        selection = batch.selection
        skipped = selection.skipped | dict.fromkeys(selection.trained, reason)
        self._consume(batch.groups, skipped)

    def guard_hold(self) -> str | None:
        """Why nothing may be leased from a guard's alarm on, also before anybody has acted on what
        it asked for. Raises StoreError."""
        if not self._alarmed:
            return None
        asked = [one for one in self.store.open_decisions() if one.kind == "pause"]
        pause = asked[0] if asked else self.store.training_pause()
        self._alarmed = pause is not None
        return None if pause is None else f"paused by {pause.by}: {pause.reason}"

    def let_go_on(self) -> None:
        """Training was held, and is not any more. Raises StoreError."""
        if self.drift is not None:
            self.drift.let_go_on()

    def release_held(self) -> None:
        """Training is held: others may take what was to become a batch."""
        if self.crash_reward is not None:
            # The gate may hold training until crashed held-out rollouts have their reward, too.
            self.crash_reward.apply(self.settings.data.incomplete_after_s)
        if self._held:
            self._let_go(self._held)
            self._held = []

    def release(self, groups: Sequence[Group]) -> None:
        """What was leased and not committed is free for the next start; `groups` beside those that
        were to become a batch."""
        self._let_go([*self._held, *groups])
        self._held = []

    def explain_no_batch(self) -> str:
        """Why there is nothing (more) to train, in one line of counts."""
        counts = self.store.turn_counts(
            self.settings.data.tags, compared=self.settings.batches.group_size > 1
        )
        if not counts.captured:
            return "nothing to train: the store holds no turns"
        parts = [f"{counts.trained} trained"]
        if counts.skipped:
            parts.append(f"{sum(counts.skipped.values())} skipped ({_counted(counts.skipped)})")
        pending = Counter(counts.pending)
        pending[_GIVEN_BACK] = self.selection.turns_set_aside
        pending["waiting"] -= pending[_GIVEN_BACK]
        if pending := +pending:
            parts.append(f"{pending.total()} waiting ({_counted(pending)})")
        return f"nothing more to train: of {counts.captured} turns {', '.join(parts)}"


def resume_point(settings: TrainerSettings, store: Store) -> ResumePoint:
    """Where the last committed step left off; nothing is changed.

    A version whose push failed may have sampled tokens with weights that were not its own, and
    one whose step was never committed had weights that are lost: such a number is not served
    again.

    Raises:
        CheckpointError: as `resume_checkpoint`.
    """
    last = Ledger(store).last_step()
    step, version = (last.step, last.version) if last else (0, 0)
    if (base := store.version_history().rollback_base(step)) is not None:
        return _rolled_back_point(settings, store, base, step, last)
    served = store.versions()
    lost = [
        v.version for v in served if v.state == "failed" or (v.step is not None and v.step > step)
    ]
    version = max([version, *(each + 1 for each in lost)])
    weights = resume_checkpoint(store, settings)
    if last is not None and weights is not None and weights.step != step:
        version = max(version, last.version + 1)  # other weights than those that had the number
    # Runs before this one that went on from here, and committed nothing, served them as these.
    again = [v.version for v in served if (v.step or 0) == step and v.version < version]
    skipped = _skipped_versions(store, weights, [*again, version], last)
    return ResumePoint(step, version, weights, skipped)


def _rolled_back_point(
    settings: TrainerSettings,
    store: Store,
    base: VersionRecord,
    step: int,
    last: StepRecord | None,
) -> ResumePoint:
    """The weights of `base` under a number that nothing else was served under; where a run has
    begun with that already, and trained nothing, under the same."""
    history = store.version_history()
    numbers = history.numbers_of(base.version)
    newest = max(history.records)
    again = newest in numbers and history.records[newest].state not in ("failed", "superseded")
    version = newest if again and newest > base.version else newest + 1
    weights = checkpoint_of_step(store, settings, base.weights_step)
    number, before = 0, list[tuple[int, int]]()
    if weights is not None:
        made = StepHistory(store).step(weights.step)
        number = base.version if made is None else made.version
        counters = read_manifest(weights.folder).get("counters", {})
        before = [(resumed, by) for resumed, by in counters.get("skipped_versions", [])]
    skipped = before
    for resumed in sorted({*numbers, version}):
        if resumed > number:
            skipped.append((resumed, resumed - number))
            number = resumed
    return ResumePoint(step, version, weights, skipped, rolled_back=True)


def _skipped_versions(
    store: Store, weights: CommittedCheckpoint | None, again: Sequence[int], last: StepRecord | None
) -> SkippedVersions:
    """Of the run that the checkpoint is of, and of each of `again`, the numbers that its weights
    were served under later."""
    before: SkippedVersions = ()
    number = newest = 0
    if weights is not None:
        assert last is not None, "only a step has a checkpoint"
        made = StepHistory(store).step(weights.step)
        number, newest = last.version if made is None else made.version, last.version
        counters = read_manifest(weights.folder).get("counters", {})
        before = [(resumed, by) for resumed, by in counters.get("skipped_versions", [])]
    found = list(before)
    for resumed in again:
        if resumed > max(number, newest):
            found.append((resumed, resumed - number))
            number = resumed
    return found


def describe_resume(point: ResumePoint, settings: TrainerSettings) -> str:
    """Where a run begins, in a line."""
    if point.weights is None and not point.step:
        return f"begins with the weights of {settings.model}"
    if point.weights is None:
        return (
            f"begins again with the weights of {settings.model} (rollback), served as version"
            f" {point.version}; the next step is {point.step + 1}"
        )
    if point.weights.step == point.step:
        return f"resumes from step {point.step}, version {point.version}"
    return (
        f"resumes with the weights of step {point.weights.step} (checkpoint.resume_from, or a"
        f" rollback), served as version {point.version}; the next step is {point.step + 1}"
    )


def _every_turn(groups: Sequence[Group], reason: str) -> dict[str, str]:
    return {turn.turn_id: reason for turn in turns_of(groups)}


def turns_of(groups: Sequence[Group]) -> list[Turn]:
    return [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]


def turn_scopes_of(
    groups: Sequence[Group], store: Store, settings: BatchSettings
) -> Mapping[str, TurnScope]:
    """By turn id; empty where nothing is selected by scope. Raises StoreError."""
    if not settings.needs_scopes:
        return {}
    rollouts = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    return store.turn_scopes(rollouts)


def without_turns(groups: Sequence[Group]) -> list[Group]:
    """What is needed to give them back, or to let go of their leases."""
    return [
        replace(group, rollouts=[replace(one, turns=[]) for one in group.rollouts])
        for group in groups
    ]


def has_equal_rewards(group: Group) -> bool:
    """Whether there is nothing to compare: such a group is replaced in a batch that refills."""
    return len(group.rollouts) > 1 and len({rollout.reward for rollout in group.rollouts}) == 1


def _counted(reasons: Mapping[str, int]) -> str:
    """`20 equal_reward, 10 stale`; a group that lacks rollouts is named as such."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    names = {
        "waiting": "in groups that lack rollouts",
        "no_task": "in rollouts without a task",
        _GIVEN_BACK: "given back, since the selection fits none",
    }
    return ", ".join(f"{count} {names.get(reason, reason)}" for reason, count in ordered)

"""What the next step of `trainer step` would be made of: worked out, and nothing touched.

No lease, no model, no judge. Everything that decides what is trained is what training uses:
the ledger's groups, the filters, the advantages, the packing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import numpy as np

from tracegrad.store import Group, IncompleteGroup, Ledger, Store
from tracegrad.store.expressions import training_state
from tracegrad.store.read.scorings import ScoringFailure, scoring_failures
from tracegrad.store.read.task_titles import load_inputs, title_of_task
from tracegrad.store.types import InferredOpen
from tracegrad_trainer.batches import MicroBatch, Row, TrainingSelection, pack, select, shares_rows
from tracegrad_trainer.batches.pattern_watch import PatternWatch
from tracegrad_trainer.batches.turn_selector import unmatched_patterns
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.checkpoint.manifest import CheckpointError, read_manifest
from tracegrad_trainer.engine.distributed import pick_device
from tracegrad_trainer.engine.flops import packing_rule
from tracegrad_trainer.engine.model.context_trial import sharing_group
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.engine.model.sharded_load import empty_model
from tracegrad_trainer.losses import AdvantageMemory, compute_advantages
from tracegrad_trainer.resampling.live_prompts import LivePrompts
from tracegrad_trainer.rewards.judge_groups import JudgeGroup, groups_to_judge
from tracegrad_trainer.rl.build_learner import engine_routing_layout, folder_vocab_size
from tracegrad_trainer.rl.coordinator import (
    MAX_REFILLS,
    ResumePoint,
    has_equal_rewards,
    resume_point,
    turn_scopes_of,
    turns_of,
)
from tracegrad_trainer.rl.intake_report import over_sample_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """`title`: the id, or where that is a hash the beginning of what was asked."""

    group_id: str
    title: str
    rewards: list[float]  # a rollout each
    advantages: tuple[float, float] | None  # least and greatest of its trained turns
    trained: int  # turns
    skipped: dict[str, int]  # reason -> turns
    rows: int
    tokens: int  # of its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoad:
    """One forward of one rank; `targets` are the tokens that carry the loss."""

    rank: int
    rows: int
    tokens: int
    targets: int
    fill: float  # share of the token budget


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """`groups` are those of the batch that would be trained; where none can be, of the last one
    that would be looked at. `passed`: turns of batches before it, of which nothing can be
    trained, by reason: a step consumes them on the way."""

    step: int
    version: int  # of the weights before it
    wanted: int  # groups
    rule: str  # objective.advantage: what rollouts are compared with
    groups: list[GroupPlan]
    more: int  # groups that are ready beyond those looked at
    trained: int  # turns
    skipped: dict[str, int]
    passed: dict[str, int]
    loads: list[MicroBatchLoad]
    budget: int  # tokens of a micro-batch
    stats: dict[str, float]
    share: float  # of a whole step that it would count for
    waiting: list[IncompleteGroup]
    idle: int  # rollouts that the step would close before (`data.idle_s`), a thousand at most
    idle_s: float | None
    inferred_open: InferredOpen  # the others that nobody opened
    pending: dict[str, int]  # turns of the store that no step has looked at, by state
    note: str | None  # what could not be known
    scoring_failures: list[ScoringFailure]  # of rollouts that have no reward because of them
    compares_states: bool  # whether turns are compared with those of equal environment state
    titles: dict[str, str]  # of the waiting tasks, by id
    live_prompts: int | None  # that would be sampled again; None: none are (`resample.prompts`)
    not_resampled: dict[str, int]  # reason -> rollouts
    judge_groups: list[JudgeGroup] | None  # not judged yet; None: none are (`rewards.judge.groups`)
    not_judged: int  # rollouts that do not say what they were asked
    uses: dict[str, list[str]]  # setting -> rollouts that it would use now
    unmatched: list[str]  # patterns of batches that fit no turn of what is ready, a line each
    given_back: bool  # the batch, since nothing of it is selected, for want of a pattern that fits

    @property
    def tokens(self) -> int:
        return sum(load.tokens for load in self.loads)


def plan_step(settings: TrainerSettings, store: Store) -> StepPlan:
    """Raises ValueError (a reward that is not finite, a row over the budget), StoreError."""
    batches, data = settings.batches, settings.data
    point, memory, note = _beginning(settings, store)
    routing = engine_routing_layout(settings)
    peek = Ledger(store).preview(
        groups=MAX_REFILLS * batches.groups,
        group_size=batches.group_size,
        tags=data.tags,
        held_out=settings.promotion.held_out,
        incomplete_after_s=0.0,  # `trainer step` waits for nobody
        expert_routing=routing is not None,
        idle_s=data.idle_s,
        over_sample=over_sample_of(settings),
        composed=settings.rewards.composes,
    )
    failed, rolled_back = store.failed_versions(), store.rolled_back_versions()
    scopes = turn_scopes_of(peek.groups, store, batches)
    live, not_resampled, unmatched = _live_prompts(settings, store)
    ready = unmatched_patterns(turns_of(peek.groups), batches, scopes)
    unmatched |= {each.name: str(each) for each in ready}
    judge_groups, not_judged = _judge_groups(settings, store)

    def choose(groups: Sequence[Group]) -> TrainingSelection:
        return select(
            groups,
            batches,
            # Training forgets what a batch taught that was not trained.
            advantages=partial(compute_advantages, settings.objective, memory=deepcopy(memory)),
            current_version=point.version,
            failed_versions=failed,
            skipped_versions=point.skipped,
            rolled_back_versions=rolled_back,
            vocabulary=folder_vocab_size(settings.model),
            routing=routing,
            scopes=scopes,
        )

    left, passed = list(peek.groups), Counter[str]()
    groups: list[Group] = []
    selection, watch = choose([]), PatternWatch(batches)
    while left and not selection.trained:
        if not watch.unfitted:  # else it is given back
            passed.update(selection.skipped.values())
        groups = _batch(left, settings)
        left = left[len(groups) :]
        watch.look(turns_of(groups), scopes)
        selection = choose(groups)
    titles = _titles(store, groups, peek.incomplete)
    packed, budget = _packed(selection.rows, settings)
    return StepPlan(
        step=point.step + 1,
        version=point.version,
        wanted=batches.groups,
        rule=settings.objective.advantage,
        groups=[_group(group, selection, titles[group.group_id]) for group in groups],
        more=len(left) + peek.more,
        trained=len(selection.trained),
        skipped=dict(Counter(selection.skipped.values())),
        passed=dict(passed),
        loads=_loads(packed, budget) if selection.trained else [],
        budget=budget,
        stats=selection.stats,
        share=settings.step_share(selection.stats["groups_trained"]),
        waiting=peek.incomplete,
        idle=peek.idle,
        idle_s=data.idle_s,
        inferred_open=peek.inferred_open,
        pending=store.turn_counts(
            data.tags, compared=batches.group_size > 1, idle_before=peek.idle_before
        ).pending,
        note=note,
        scoring_failures=_scoring_failures(settings, store),
        compares_states=settings.objective.advantage == "gigpo",
        titles={task.task_id: titles[task.task_id] for task in peek.incomplete},
        live_prompts=None if live is None else len(live),
        not_resampled=not_resampled,
        judge_groups=judge_groups,
        not_judged=not_judged,
        uses=_uses(groups, judge_groups, live),
        unmatched=list(unmatched.values()),
        given_back=bool(watch.unfitted),
    )


def _live_prompts(
    settings: TrainerSettings, store: Store
) -> tuple[list[str] | None, dict[str, int], dict[str, str]]:
    """Rollouts, why others are not, and patterns that fit none of them (`PatternWatch`)."""
    if settings.resample.prompts == "none":
        return None, {}, {}
    held_out = settings.promotion.held_out
    prompts = LivePrompts(store, settings.resample, held_out, settings.batches)
    found, reasons = prompts.usable()
    return found, dict(reasons), prompts.patterns.unmatched


def _judge_groups(settings: TrainerSettings, store: Store) -> tuple[list[JudgeGroup] | None, int]:
    judge = settings.rewards.judge
    if judge is None or judge.groups == "task":
        return None, 0
    return groups_to_judge(
        store,
        judge,
        tags=settings.data.tags,
        size=settings.batches.group_size,
        incomplete_after_s=settings.data.incomplete_after_s,
        held_out=settings.promotion.held_out,
    )


def _uses(
    groups: Sequence[Group], to_judge: Sequence[JudgeGroup] | None, live: Sequence[str] | None
) -> dict[str, list[str]]:
    """Which rule would use which rollout, of those that one would use now."""
    found = {
        "objective.advantage": [one.rollout_id for group in groups for one in group.rollouts],
        "rewards.judge.groups": [
            name
            for group in to_judge or ()
            if group.smaller_in_s is not None
            for name in group.rollouts
        ],
        "resample.prompts": list(live or ()),
    }
    return {rule: rollouts for rule, rollouts in found.items() if rollouts}


def _scoring_failures(settings: TrainerSettings, store: Store) -> list[ScoringFailure]:
    state = training_state(settings.data.tags, time.time(), composed=settings.rewards.composes)
    with store.reading() as connection:
        return scoring_failures(connection, state == "scoring_failed")


def _titles(
    store: Store, groups: Sequence[Group], waiting: Sequence[IncompleteGroup]
) -> dict[str, str]:
    """What each group or waiting task is about, by its id, as one of its rollouts has it."""
    one = {group.group_id: group.rollouts[0].rollout_id for group in groups}
    one |= {task.task_id: task.ready[0] for task in waiting}
    with store.reading() as connection:
        asked = load_inputs(connection, list(one.values()))
    return {
        name: title_of_task(None if name == rollout else name, asked.get(rollout)) or name
        for name, rollout in one.items()
    }


def _beginning(
    settings: TrainerSettings, store: Store
) -> tuple[ResumePoint, AdvantageMemory, str | None]:
    """Where training stands, what advantages remember, and what of that is not known."""
    note = None
    if settings.objective.judge is not None:
        note = "the judge is not asked here: rewards are those that the store has"
    elif settings.rewards.composes:
        note = "nothing is scored here: rewards are those that the store has"
    try:
        point = resume_point(settings, store)
        if point.weights is None:
            return point, {}, note
        manifest = read_manifest(point.weights.folder)
    except CheckpointError as error:
        last = Ledger(store).last_step()
        assert last is not None, "only a step has a checkpoint"
        return ResumePoint(last.step, last.version, None), {}, str(error)
    return point, manifest["counters"].get("memory", {}), note


def _batch(ready: Sequence[Group], settings: TrainerSettings) -> list[Group]:
    """As the coordinator fills one: with refills until enough groups have different rewards."""
    wanted = settings.batches.groups
    if not settings.refills:
        return list(ready[:wanted])
    taken: list[Group] = []
    different = 0
    for group in ready:
        if different == wanted:
            break
        taken.append(group)
        different += not has_equal_rewards(group)
    return taken


def _group(group: Group, selection: TrainingSelection, title: str) -> GroupPlan:
    ours = {rollout.rollout_id for rollout in group.rollouts}
    turns = {turn.turn_id for rollout in group.rollouts for turn in rollout.turns}
    rows = [row for row in selection.rows if row.rollout_id in ours]
    values = np.concatenate([np.zeros(0), *(row.advantage[row.keep] for row in rows)])
    reasons = Counter(why for turn_id, why in selection.skipped.items() if turn_id in turns)
    return GroupPlan(
        group_id=group.group_id,
        title=title,
        rewards=[rollout.reward for rollout in group.rollouts],
        advantages=(float(values.min()), float(values.max())) if len(values) else None,
        trained=len(turns & set(selection.trained)),
        skipped=dict(reasons),
        rows=len(rows),
        tokens=sum(len(row) for row in rows),
    )


def _packed(rows: Sequence[Row], settings: TrainerSettings) -> tuple[list[list[MicroBatch]], int]:
    """As the ranks have it, of a group of them what all of it has; and the budget of each."""
    fsdp, budget = settings.fsdp, settings.batches.tokens_per_micro_batch
    model = prepare_model(empty_model(settings.model), fsdp)
    ranks, group = settings.ranks, fsdp.context_ranks
    rule = packing_rule(model)
    if fsdp.context_parallel == "auto":
        size = sharing_group([model], fsdp, pick_device(fsdp), ranks)
        rule = packing_rule(model, size)
        if shares_rows([rows], ranks=ranks, budget=budget, rule=rule):
            group, budget = size, size * budget
    return pack(rows, ranks=max(1, ranks // group), budget=budget, rule=rule), budget


def _loads(packed: Sequence[Sequence[MicroBatch]], budget: int) -> list[MicroBatchLoad]:
    return [
        MicroBatchLoad(
            rank=rank,
            rows=int((batch.row_keys >= 0).sum()),
            tokens=(tokens := batch.tokens if (batch.row_keys >= 0).any() else 0),
            targets=len(batch.target),
            fill=tokens / budget,
        )
        for rank, batches in enumerate(packed)
        for batch in batches
    ]

"""A recorded step as it can be run again: its groups, its settings, the weights before it.

Everything here reads; a replay leaves store and checkpoints as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracegrad.events import Json
from tracegrad.inspect.metric_points import current_names, trained_turns
from tracegrad.store import Group, RolloutSample, StepHistory, StepRecord, Store
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.engine.checkpoint.manifest import (
    CheckpointError,
    checkpoint_step,
    list_checkpoints,
    may_exist,
)
from tracegrad_trainer.rl.committed_checkpoint import CommittedCheckpoint, committed_checkpoint_of
from tracegrad_trainer.rl.step_inputs import RolloutInputs, StepInputs


class ReplayError(ValueError):
    """The step cannot be replayed; one line says why, and what can be done."""


class CheckpointMissing(ReplayError):
    """That of the weights that the step began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """`groups` are as the step saw them. It began with `checkpoint` (None: the model folder's
    weights) and the updates of the steps `since` then, which have none of their own, in order.
    `scopes`: of the turns, by id.
    `digest` is what the checkpoint's manifest must have, where that is known."""

    step: StepRecord
    batch: StepInputs
    groups: list[Group]
    trained: frozenset[str]
    checkpoint: Path | None
    digest: str | None = None
    since: tuple[RecordedStep, ...] = ()
    scopes: Mapping[str, TurnScope] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[RolloutSample]:
        return [rollout for group in self.groups for rollout in group.rollouts]


@dataclass(frozen=True, slots=True)
class ReplayCandidate:
    """A step of the list; `problem` None: it can be replayed."""

    step: StepRecord
    problem: str | None


def load_recorded_step(
    store: Store, number: int | None, state_dir: Path, *, checkpoint: Path | None = None
) -> RecordedStep:
    """The step `number`, or the last one; `checkpoint` instead of the one before it.

    Raises:
        ReplayError: it cannot be replayed.
    """
    history = StepHistory(store)
    record = _step(history, number)
    if checkpoint is not None:
        if not checkpoint.is_dir():
            raise ReplayError(f"--checkpoint {checkpoint}: there is no such folder")
        return _recorded(history, record, checkpoint)
    began_with = _batch(record).weights
    before, since = weights_before(history, record, state_dir, began_with)
    return replace(
        _recorded(history, record, None if before is None else before.folder),
        digest=None if before is None else before.digest,
        since=tuple(_recorded(history, _step(history, one.step), None) for one in since),
    )


def _recorded(history: StepHistory, record: StepRecord, checkpoint: Path | None) -> RecordedStep:
    batch = _batch(record)
    groups = _groups(history, record.step, batch)
    names = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    return RecordedStep(
        step=replace(record, metrics=current_names(record.metrics)),
        batch=batch,
        groups=groups,
        trained=frozenset(history.turns_trained(record.step)),
        checkpoint=checkpoint,
        scopes=history.turn_scopes(names),
    )


def _batch(record: StepRecord) -> StepInputs:
    if record.batch is None:
        raise ReplayError(
            f"step {record.step} was recorded before steps said what they were made of: only"
            " later ones can be replayed (--list)"
        )
    return StepInputs.model_validate(record.batch)


def list_candidates(store: Store, state_dir: Path, *, limit: int) -> list[ReplayCandidate]:
    """The last `limit` steps, the newest first, and why some cannot be replayed."""
    history = StepHistory(store)
    recorded, steps = history.steps_with_batch(limit), history.steps(limit)
    found = []
    for step in reversed(steps):
        problem = None if step.step in recorded else "recorded without its batch"
        since: list[StepRecord] = []
        try:
            if problem is None:
                _, since = weights_before(history, step, state_dir)
        except CheckpointMissing:
            problem = "the checkpoint before it is gone"
        except ReplayError:
            problem = "the checkpoint before it is not the one that was committed"
        trained = history.count_trained([one.step for one in (*since, step)])
        for one in (*since, step):  # those since the checkpoint are trained again first
            gone = trained_turns(one.metrics) - trained[one.step]
            if problem is None and gone > 0:
                whose = "its" if one is step else f"step {one.step}'s"
                problem = f"{gone} of {whose} turns were removed"
        found.append(ReplayCandidate(step, problem))
    return found


def weights_before(
    history: StepHistory, record: StepRecord, state_dir: Path, began_with: int | None = None
) -> tuple[CommittedCheckpoint | None, list[StepRecord]]:
    """What the step began with: a checkpoint (None: the model folder), and the steps since that one
    that have none of their own. `began_with`, where it is known: of which step's weights.

    Raises:
        CheckpointMissing: says which ones are there.
        ReplayError: another one has its place.
    """
    since: list[StepRecord] = []
    before = history.before(record.step)
    while before is not None and before.checkpoint is None:
        since.insert(0, before)
        before = history.before(before.step)
    first = since[0] if since else record
    if before is not None and first.parent_digest not in (None, before.manifest_digest):
        before = history.with_digest(first.parent_digest)  # it went on from an older checkpoint
    elif not since and before is not None and began_with not in (None, before.step):
        before = history.step(began_with)
    if before is None:
        return None, since
    assert before.checkpoint is not None, "the loop ends there"
    recorded = Path(before.checkpoint)
    root = state_dir / "checkpoints"
    if may_exist(root / recorded.name) or may_exist(recorded):  # the state may have been moved
        try:
            return committed_checkpoint_of(before, root), since
        except CheckpointError as error:
            raise ReplayError(str(error)) from None
    raise CheckpointMissing(
        f"step {record.step} began with the weights of step {before.step}, whose checkpoint is gone"
        f" ({recorded}); {_what_is_there(root)}"
    )


def recorded_settings(recorded: RecordedStep, *, model: Path | None = None) -> Json:
    """The step's settings as they are stored, less what a replay has no part in: there is no
    proxy (whose key is masked there), and sinks of metrics hear nothing of it."""
    stored: dict[str, Any] = dict(recorded.step.settings)
    stored.pop("metrics", None)
    stored["proxy"] = {"host": "127.0.0.1", "port": stored.get("proxy", {}).get("port", 4141)}
    # The judge has spoken: the rewards that it gave are in the record.
    stored["objective"] = {**stored.get("objective", {}), "judge": None}
    # Steps that do not say it were taken before there was a choice.
    before = {"compute_dtype": "float32", "frozen_dtype": "float32"}
    stored["fsdp"] = {**before, **(stored.get("fsdp") or {})}
    if model is not None:
        stored["model"] = str(model)
        stored["vllm"] = {**stored.get("vllm", {}), "model": str(model)}
    return stored


def _step(history: StepHistory, number: int | None) -> StepRecord:
    latest = history.steps(1)
    if not latest:
        raise ReplayError("the store holds no step: nothing was trained yet")
    record = history.step(latest[0].step if number is None else number)
    if record is None:
        raise ReplayError(f"there is no step {number}: the last one is {latest[0].step} (--list)")
    return record


def _what_is_there(root: Path) -> str:
    there = [checkpoint_step(folder) for folder in list_checkpoints(root)]
    if not there:
        return f"{root} has none: give one by --checkpoint"
    kept = ", ".join(map(str, there))
    return (
        f"there are those of {kept}, so the steps after these can be replayed"
        " (checkpoint.keep and keep_every say how many stay)"
    )


def _groups(history: StepHistory, number: int, batch: StepInputs) -> list[Group]:
    rewards = {
        rollout.rollout_id: rollout.reward for group in batch.groups for rollout in group.rollouts
    }
    samples = history.samples(rewards)
    if gone := [rollout_id for rollout_id in rewards if rollout_id not in samples]:
        raise ReplayError(
            f"{len(gone)} of the {len(rewards)} rollouts of step {number} were removed from the"
            f" store (the first: {gone[0]}): its turns cannot be trained again"
        )
    return [
        Group(
            group_id=group.group_id,
            lease_id="",
            expires_at=0.0,
            rollouts=[_as_seen(samples[one.rollout_id], one, number) for one in group.rollouts],
        )
        for group in batch.groups
    ]


def _as_seen(sample: RolloutSample, seen: RolloutInputs, number: int) -> RolloutSample:
    """Without the turns and the rewards that came after the step."""
    if len(sample.turns) < seen.turns:
        raise ReplayError(
            f"rollout {seen.rollout_id} has {len(sample.turns)} turns, and had {seen.turns} in"
            f" step {number}: some were removed"
        )
    turns = sample.turns[: seen.turns]
    return replace(sample, reward=seen.reward, turn_rewards=dict(seen.turn_rewards), turns=turns)


def check_selection(
    recorded: RecordedStep, trained: Sequence[str], skipped: Mapping[str, str]
) -> None:
    """`trained` and `skipped` (why) are what the same settings select now.

    Raises:
        ReplayError: it is not what the step trained.
    """
    number, now = recorded.step.step, set(trained)
    if lost := sorted(recorded.trained - now):
        why = skipped.get(lost[0], "it is not among the turns that the batch saw")
        raise ReplayError(
            f"{len(lost)} of the {len(recorded.trained)} turns that step {number} trained cannot be"
            f" trained now (the first: {lost[0]}): {_MEANING.get(why, why)}"
        )
    if more := sorted(now - recorded.trained):
        raise ReplayError(
            f"{len(more)} turns would be trained now that step {number} did not train (the first:"
            f" {more[0]}): a filter of its settings decides otherwise today"
        )


# Of reasons that a turn which was trained may have now.
_MEANING = {
    "redacted": "its tokens were redacted",
    "foreign_token": "it has tokens that this model does not know: was another one trained?"
    " (--model)",
}

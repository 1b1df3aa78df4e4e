"""How a step is made again on the trainer's machine: the command lines, and what stands in their
way as far as the store knows it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePath

from tracegrad.inspect.metric_points import trained_turns
from tracegrad.store import StepHistory, StepRecord

# Another objective to begin with; for a step that had it the other one.
_OTHER_PRESETS = ("gspo", "dapo")
# Settings, one at a time, and what they ask.
_CHANGES = (("batches.max_staleness=0", "Without the turns that older versions sampled"),)


@dataclass(frozen=True, slots=True)
class ReplayLine:
    asks: str
    command: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`problem`: why the step cannot be replayed; None: nothing in the store is against it.
    `begins`: what a replay begins with."""

    problem: str | None
    begins: str
    lines: list[ReplayLine]


def what_if(history: StepHistory, record: StepRecord) -> WhatIf:
    checkpoint = _checkpoint_before(history, record)
    return WhatIf(
        problem=_problem(history, record),
        begins=_begins(history, record, checkpoint),
        lines=_lines(record, checkpoint),
    )


def _checkpoint_before(history: StepHistory, record: StepRecord) -> StepRecord | None:
    """The step whose checkpoint it began with, or went on from; None: none is recorded."""
    before = history.last_checkpoint_before(record.step)
    if before is None or record.parent_digest in (None, before.manifest_digest):
        return before
    assert record.parent_digest is not None, "it is another digest"
    return history.with_digest(record.parent_digest)


def _problem(history: StepHistory, record: StepRecord) -> str | None:
    if record.batch is None:
        return "it was recorded without its batch, before steps said what they were made of"
    try:
        gone = trained_turns(record.metrics) - history.count_trained([record.step])[record.step]
    except (TypeError, ValueError, OverflowError):  # what was counted is no number
        return None
    return f"of the turns that it trained {gone:,} are gone" if gone > 0 else None


def _begins(history: StepHistory, record: StepRecord, checkpoint: StepRecord | None) -> str:
    if checkpoint is None and record.parent_digest is not None:
        return "a checkpoint of which no step is recorded any more: give one by --checkpoint"
    if checkpoint is None:
        said = "the model folder's weights: no step before it has a checkpoint"
    else:
        said = f"the checkpoint of step {checkpoint.step}, {checkpoint.checkpoint}"
    before = history.before(record.step)
    if before is None or before.checkpoint is not None:
        return said
    return f"{said}; the steps since, to step {before.step}, are trained again first"


def _lines(record: StepRecord, checkpoint: StepRecord | None) -> list[ReplayLine]:
    command = f"trainer replay {record.step}{_state_folder(record, checkpoint)}"
    objective = record.settings.get("objective")
    preset = objective.get("preset") if isinstance(objective, dict) else None
    other = next(name for name in _OTHER_PRESETS if name != preset)
    return [
        ReplayLine("As it was, with the share of each turn", f"{command} --turns"),
        ReplayLine(f"With another objective, {other}", f"{command} --preset {other}"),
        *(ReplayLine(asks, f"{command} --set {change}") for change, asks in _CHANGES),
    ]


def _state_folder(*records: StepRecord | None) -> str:
    """The option that names it; "": no checkpoint says where it is."""
    for record in records:
        folder = PurePath(record.checkpoint).parent if record and record.checkpoint else None
        if folder is not None and folder.name == "checkpoints":
            return f" --state-dir {shlex.quote(str(folder.parent))}"
    return ""

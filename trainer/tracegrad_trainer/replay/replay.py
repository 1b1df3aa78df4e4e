"""`trainer replay`: a recorded step once more, beside what was recorded and what might have been.

On a CPU the same turns, weights, settings, ranks and threads give the same numbers, to the last
bit. So a difference has a cause, and another objective on the same turns can be compared with what
happened, without noise.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from tracegrad.events import Json
from tracegrad.inspect.step_metrics import find_metric
from tracegrad.settings_sources import SettingsError
from tracegrad.store import Store
from tracegrad_trainer.config.loading import apply_override, problem_lines, without_unused
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.checkpoint.base_model import BaseModelRecord, base_model_difference
from tracegrad_trainer.engine.checkpoint.manifest import CheckpointError, read_manifest
from tracegrad_trainer.launch.torchrun import torchrun_command
from tracegrad_trainer.losses import PRESETS
from tracegrad_trainer.replay.load import (
    RecordedStep,
    ReplayError,
    load_recorded_step,
    recorded_settings,
)
from tracegrad_trainer.replay.run import ReplayJob, ReplayRun, run_on_this_rank
from tracegrad_trainer.replay.turn_contributions import TurnContribution
from tracegrad_trainer.rl.rank_main import search_working_folder
from tracegrad_trainer.utils.distributed import launch_rank
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

# Tables of settings that another run of the same turns may change.
CHANGEABLE = ("objective", "optim", "batches", "fsdp")
REPLAY_TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What is to be replayed. `overrides` are `table.name=value`, as the trainer's own `--set`."""

    step: int | None = None  # None: the last one
    checkpoint: Path | None = None
    model: Path | None = None
    preset: str | None = None
    overrides: Sequence[str] = field(default_factory=tuple)

    @property
    def other(self) -> bool:
        return self.preset is not None or bool(self.overrides)

    @property
    def other_name(self) -> str:
        changes = [change.removeprefix("objective.") for change in self.overrides]
        return ", ".join([*([self.preset] if self.preset else []), *changes])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    recorded: RecordedStep
    replayed: ReplayRun
    other: ReplayRun | None
    other_name: str

    @property
    def compared(self) -> dict[str, tuple[float, float]]:
        """Name -> (recorded, replayed), of the numbers that both have and no clock has a part in.

        Other versions of this program may record more or fewer.
        """
        before = self.recorded.step.metrics
        return {
            name: (before[name], value)
            for name, value in self.replayed.metrics.items()
            if name in before and not _by_the_clock(name) and not _by_other_bounds(name, before)
        }

    @property
    def differing(self) -> list[str]:
        found = [name for name, (a, b) in self.compared.items() if not bitwise_equal(a, b)]
        if self.replayed.dropped_rows != self.recorded.batch.dropped_rows:
            found.append("dropped_rows")
        return found

    @property
    def equal(self) -> bool:
        return not self.differing

    def as_json(self) -> Json:
        step, before = self.recorded.step, self.recorded.step.metrics
        metrics: dict[str, Any] = {
            name: {"recorded": before.get(name), "replayed": value}
            for name, value in self.replayed.metrics.items()
        }
        for name, value in self.other.metrics.items() if self.other is not None else ():
            metrics.setdefault(name, {"recorded": None, "replayed": None})["other"] = value
        return {
            "step": step.step,
            "version": step.version,
            "checkpoint": None if (path := self.recorded.checkpoint) is None else str(path),
            "trained_again": [one.step.step for one in self.recorded.since],
            "equal": self.equal,
            "differing": self.differing,
            "other": self.other_name if self.other is not None else None,
            "metrics": metrics,
            "recorded_only": {k: v for k, v in before.items() if k not in metrics},
            "turns": [asdict(turn) for turn in by_gradient_share(self.replayed.turns)],
            "other_turns": [asdict(turn) for turn in by_gradient_share(self.other.turns)]
            if self.other is not None
            else None,
            "skipped": self.replayed.skipped,
            "other_skipped": self.other.skipped if self.other is not None else None,
        }


def replay(store: Store, state_dir: Path, asked: ReplayRequest) -> ReplayResult:
    """Runs the step again, and under the other settings if any are asked for.

    Raises:
        ReplayError, SettingsError: it cannot be; one line.
        StoreError
    """
    recorded = load_recorded_step(store, asked.step, state_dir, checkpoint=asked.checkpoint)
    stored = recorded_settings(recorded, model=asked.model)
    settings = [_resolved(stored, f"the settings of step {recorded.step.step}", own=True)]
    _check_base_model(recorded, settings[0])
    if asked.other:
        other = _resolved(with_other_objective(stored, asked), asked.other_name)
        _check_possible(recorded, settings[0], other, asked.other_name)
        settings.append(other)
    with tempfile.TemporaryDirectory(prefix="tracegrad-replay-") as folder:
        ran = run_job(ReplayJob(recorded, settings, Path(folder)))
    return ReplayResult(
        recorded=recorded,
        replayed=ran[0],
        other=ran[1] if asked.other else None,
        other_name=asked.other_name,
    )


def run_job(job: ReplayJob) -> list[ReplayRun]:
    """With as many ranks as recorded; a single one is this process.

    Raises:
        ReplayError: a rank failed; its line.
    """
    ranks = job.recorded.batch.ranks
    if ranks == 1:
        return run_on_this_rank(job)
    path = job.folder / "job"
    path.write_bytes(pickle.dumps(job))
    command = torchrun_command(ranks, "tracegrad_trainer.replay.replay", str(path))
    env = {"OMP_NUM_THREADS": str(job.recorded.batch.threads)}
    child = ChildProcess("replay", command, log=job.folder / "log", env=env)
    child.start()
    result, error = path.with_suffix(".result"), path.with_suffix(".error")
    try:
        child.wait_until_ready(result.exists, timeout_s=REPLAY_TIMEOUT_S)
    except ChildError as ended:
        raise ReplayError(error.read_text() if error.exists() else str(ended)) from None
    finally:
        child.stop()
    found: list[ReplayRun] = pickle.loads(result.read_bytes())
    return found


def main(arguments: Sequence[str]) -> int:
    """One rank of `run_job`'s: rank 0 puts what came of the job, or the error, beside its file."""
    search_working_folder()
    path = Path(arguments[0])
    job: ReplayJob = pickle.loads(path.read_bytes())
    try:
        ran = run_on_this_rank(job)
    except (ValueError, OSError) as error:
        if launch_rank() == 0:
            path.with_suffix(".error").write_text(str(error))
        return 1
    if ran:
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(ran))
        partial.rename(path.with_suffix(".result"))  # who waits for it sees it whole
    return 0


def with_other_objective(stored: Json, asked: ReplayRequest) -> Json:
    """The recorded settings with another objective in them.

    A preset is taken whole; without one, what is set changes the recorded objective.
    """
    found: dict[str, Any] = json.loads(json.dumps(stored))
    if asked.preset is not None:
        if asked.preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ReplayError(f"--preset {asked.preset}: there is none; take one of {known}")
        found["objective"] = {"preset": asked.preset}
    found = without_unused(found)
    for change in asked.overrides:
        name, equals, text = change.partition("=")
        if equals and name.partition(".")[0] not in CHANGEABLE:
            raise ReplayError(
                f"--set {change!r}: the turns are as they were recorded; what may change is in"
                f" {', '.join(CHANGEABLE)}"
            )
        if name == "objective.preset":
            raise ReplayError(f"--set {change!r}: say --preset {text}")
        try:
            apply_override(found, change)
        except SettingsError as error:
            raise ReplayError(str(error)) from None
    return found


def _check_base_model(recorded: RecordedStep, settings: TrainerSettings) -> None:
    """Raises ReplayError: the step was trained from another model folder than the one given. Full
    weights are all in the checkpoint that it began with, and then the folder's may be others."""
    own = recorded.step.checkpoint
    for folder in (recorded.checkpoint, Path(own) if own else None):
        if folder is None:
            continue
        try:
            base = read_manifest(folder).get("base")
        except CheckpointError:
            continue
        if base is None:
            continue
        problem = base_model_difference(
            BaseModelRecord.model_validate(base),
            settings.model,
            settings.fsdp.lora,
            weights=recorded.checkpoint is None,
        )
        if problem:
            said = problem.replace("model = ", "--model ", 1)
            raise ReplayError(f"{said} (step {recorded.step.step}); name the folder of those")
        return


def _check_possible(
    recorded: RecordedStep, own: TrainerSettings, other: TrainerSettings, name: str
) -> None:
    """Raises ReplayError: a step of groups, or its checkpoint, lacks what the other needs."""
    if other.objective.surrogate in ("dpo", "kto"):
        raise ReplayError(
            f"{name}: it learns from pairs, and a step was made of groups: see `trainer sft`"
        )
    new = other.objective.needs - own.objective.needs
    if "value" in new and (recorded.checkpoint is not None or recorded.since):
        raise ReplayError(
            f"{name}: it learns values, and the weights that step {recorded.step.step} began with"
            " have no value head: step 1, which begins with the model folder, can be tried"
        )


def by_gradient_share(turns: Sequence[TurnContribution]) -> list[TurnContribution]:
    """Those with the largest share of the gradient first."""
    return sorted(turns, key=lambda turn: (-abs(turn.gradient_share), turn.turn_id))


def advantage_std(turns: Sequence[TurnContribution]) -> float:
    """Deviation of the advantages over the trained turns."""
    return float(np.std([turn.advantage for turn in turns])) if turns else 0.0


def bitwise_equal(a: float, b: float) -> bool:
    """Bit for bit, but that not-a-number is itself."""
    return a == b or (math.isnan(a) and math.isnan(b))


def _by_the_clock(name: str) -> bool:
    known = find_metric(name)
    return known is not None and known.clock


def _by_other_bounds(name: str, before: Json) -> bool:
    """Steps recorded before there were quantiles had a verdict by the trainer's dtype alone."""
    return name == "mismatch" and "gap_p50" not in before


def _resolved(stored: Json, whose: str, *, own: bool = False) -> TrainerSettings:
    try:
        return TrainerSettings.model_validate(without_unused(stored) if own else stored)
    except ValidationError as error:
        raise ReplayError(f"{whose}: {problem_lines(error)[0]}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

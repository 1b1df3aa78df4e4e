"""Progress records of a run of `trainer sft`, one JSON object a line, and lines of text for people.

`metrics.jsonl` in the run's folder keeps them; `progress_file` is where the command that waits for
the run reads them from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracegrad.events import Json
from tracegrad.store import StepRecord
from tracegrad.text_format import format_count
from tracegrad_trainer.engine.step.result import StepResult
from tracegrad_trainer.metrics import MetricSinks
from tracegrad_trainer.sft.evaluate import EvalResult
from tracegrad_trainer.sft.schedule import SftData

METRICS = "metrics.jsonl"

# Metrics about the engine that sampled a step's turns: they mean nothing where those are imitated.
_OF_SAMPLING = (
    *("gap", "k1", "k3", "ess", "max_w", "turn_max_w", "corrected", "masked", "difference"),
    *("staleness", "mismatch"),
)


class SftReport:
    """For rank 0."""

    def __init__(self, folder: Path, progress_file: Path, sinks: MetricSinks | None = None) -> None:
        self.file = folder / METRICS
        self.progress_file = progress_file
        self.sinks = sinks

    def run_started(self, data: SftData, folder: Path) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._publish({"event": "data", "run": str(folder), **data_counts(data)})

    def run_resumed(self, taken: int) -> None:
        """What a killed run reported after its last checkpoint is reported again; without a
        checkpoint all of it."""
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # not what a full disk cut off
        kept = [line for line in whole if taken and json.loads(line)["step"] <= taken]
        part = self.file.with_suffix(".part")
        part.write_text("".join(kept))
        part.replace(self.file)
        if taken:
            self._publish({"event": "resumed", "step": taken})

    def step_taken(self, epoch: int, number: int, done: StepResult) -> None:
        metrics = {k: v for k, v in done.metrics.items() if not k.startswith(_OF_SAMPLING)}
        metrics |= {k: v for k, v in done.speed.items() if k == "tokens_per_second"}
        self._keep({"event": "step", "epoch": epoch, "step": number, **metrics})
        if self.sinks is not None:
            self.sinks.step(StepRecord(step=number, version=0, metrics=metrics))

    def evaluated(self, epoch: int, taken: int, found: EvalResult) -> None:
        values = {"loss": found.loss, "accuracy": found.accuracy}
        self._keep({"event": "held_out", "epoch": epoch, "step": taken, **values})

    def stopped(self, taken: int) -> None:
        self._publish({"event": "stopped", "step": taken})

    def run_ended(self, model: Path) -> None:
        self._publish({"event": "done", "model": str(model)})

    def failed(self, error: str) -> None:
        self._publish({"event": "failed", "error": error})

    def _keep(self, record: Json) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._publish(record)

    def _publish(self, record: Json) -> None:
        self.progress_file.parent.mkdir(parents=True, exist_ok=True)
        with self.progress_file.open("a") as file:
            file.write(json.dumps(record) + "\n")


def data_counts(data: SftData) -> Json:
    """How much is learnt and measured, what is left out and why, and which patterns fit nothing."""

    def tokens(units: Any) -> dict[str, int]:
        return {
            "examples": len(units),
            "tokens": sum(unit.tokens for unit in units),
            "targets": sum(unit.targets for unit in units),
        }

    return {
        "matched": data.found,
        "rollouts": data.rollouts,
        "turns": data.turns,
        "pairs": data.pairs,
        "learnt": tokens(data.train),
        "held_out": tokens(data.held_out),
        "left_out": dict(data.reasons.most_common()),
        "unmatched": list(map(str, data.unmatched)),
    }


def format_record(record: Mapping[str, Any]) -> str:
    """A record for people."""
    return _LINES[record["event"]](record)


def _data(record: Mapping[str, Any]) -> str:
    learnt, held_out = record["learnt"], record["held_out"]
    pairs = f", {record['pairs']} pairs" if record["pairs"] else ""
    lines = [
        f"{record['matched']} rollouts match, {record['rollouts']} are used:"
        f" {record['turns']} turns{pairs}",
        f"  learnt    {_amount(learnt)}",
        f"  held out  {_amount(held_out)}",
    ]
    lines += [f"  left out  {what}: {count}" for what, count in record["left_out"].items()]
    lines += record["unmatched"]
    return "\n".join(lines)


def _amount(part: Mapping[str, int]) -> str:
    if not part["examples"]:
        return "nothing"
    examples = format_count(part["examples"], "example")
    return f"{examples}, {part['targets']} of {part['tokens']} tokens are targets"


def _step(record: Mapping[str, Any]) -> str:
    skipped = "  skipped: not finite" if record.get("step_skipped") else ""
    return (
        f"epoch {record['epoch']}  step {record['step']}  loss {record['loss']:.4f}"
        f"  grad {record['grad_norm']:.3g}  lr {record['lr']:.2g}"
        f"  {record.get('tokens_per_second', 0):.0f} tokens/s{skipped}"
    )


def _held_out(record: Mapping[str, Any]) -> str:
    when = f"after epoch {record['epoch']}" if record["epoch"] else "before training"
    return f"held out, {when}: loss {record['loss']:.4f}, accuracy {record['accuracy']:.3f}"


_LINES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data": _data,
    "resumed": lambda record: f"goes on behind step {record['step']}, from its checkpoint",
    "step": _step,
    "held_out": _held_out,
    "stopped": lambda record: f"stopped behind step {record['step']}; the same command goes on",
    "done": lambda record: f"model: {record['model']}",
    "failed": lambda record: f"trainer sft: {record['error']}",
}

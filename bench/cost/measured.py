"""The model of cost held against this machine's CPU: bytes exactly, seconds in their shape. Rates
(operations, bytes a second) are fitted on three sizes of a model and tried on a fourth."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.cost.model import Shapes, checkpoint_bytes
from bench.gpu_check.check import Machine
from bench.gpu_check.models import Size, random_model, random_rows
from bench.gpu_check.speed import our_learner
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import Learner, destroy_process_group, full_tensors
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.inference.weight_files import WeightFiles

REPEATS = 5
STAGES = ("step", "push files", "checkpoint")


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one size: what the model says (operations or bytes) and what was seen (seconds), by stage;
    bytes on the disk."""

    name: str
    parameters: int
    expected: dict[str, float]
    seconds: dict[str, float]
    written: dict[str, int]


def sizes(tiny: bool) -> list[Size]:
    """The last one is predicted."""
    shapes = (
        [(32, 2), (48, 2), (64, 3), (96, 3)] if tiny else [(256, 4), (384, 6), (640, 8), (512, 8)]
    )
    rows = (24, 24) if tiny else (512,) * 4
    return [
        Size(
            f"{hidden} x {layers}",
            {
                "vocab_size": 61 if tiny else 8192,
                "hidden_size": hidden,
                "intermediate_size": 3 * hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": hidden // 4,
            },
            rows=rows,
            budget=sum(rows),
        )
        for hidden, layers in shapes
    ]


def measure(size: Size, folder: Path, *, tiny: bool) -> Measured:
    shapes = Shapes.of(random_model(size, "sdpa", "meta"))
    machine = Machine(torch.device("cpu"), tiny, folder)
    (batches,) = pack(
        random_rows(size.rows, size.config["vocab_size"]), ranks=1, budget=size.budget
    )
    try:
        learner = our_learner(size, machine, compute_dtype="float32")
        step = _seconds(lambda: learner.train(batches, version=0))
        pushed, push = _push(learner, folder)
        saved, save = _checkpoint(learner, folder)
    finally:
        destroy_process_group()
    served = 4 * shapes.parameters  # in float32, as a CPU's engine has them
    return Measured(
        size.name,
        shapes.parameters,
        {
            "step": sum(shapes.row(tokens) for tokens in size.rows),
            "push files": served,
            "checkpoint": checkpoint_bytes(shapes),
        },
        {"step": step, "push files": push, "checkpoint": save},
        {"push files": pushed, "checkpoint": saved},
    )


def _seconds(work: Callable[[], object]) -> float:
    """The median, after one that is not counted."""
    work()
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _push(learner: Learner, folder: Path) -> tuple[int, float]:
    files = WeightFiles(folder)
    try:
        took = _seconds(lambda: files.write(1, full_tensors(learner.model)))
        size = sum(path.stat().st_size for path in (files.folder / "1").iterdir())
    finally:
        files.close()
    return size, took


def _checkpoint(learner: Learner, folder: Path) -> tuple[int, float]:
    saver, root = CheckpointSaver(folder / "checkpoints"), folder / "checkpoints"

    def save() -> None:
        saver.start(learner, 1, {})
        saver.wait()

    took = _seconds(save)
    made = root / "step-00000001"
    size = sum(path.stat().st_size for path in made.iterdir())
    shutil.rmtree(root)
    return size, took


def predicted(found: list[Measured], stage: str) -> float:
    """Seconds of the last one, by the rate of the others: the geometric mean of what each did."""
    rates = [one.expected[stage] / one.seconds[stage] for one in found[:-1]]
    return found[-1].expected[stage] / math.exp(statistics.fmean(map(math.log, rates)))

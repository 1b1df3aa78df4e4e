"""Learners, and what each of the two ranks does that `test_save_load` starts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from support.trainer.learners import build, weights
from support.trainer.row_samples import rows
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    destroy_process_group,
    init_process_group,
    load_checkpoint,
)
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.losses import preset

VERSION = 3


def learner(folder: Path, *, valued: bool = False, **fsdp: Any) -> Learner:
    return build(folder, preset("grpo", **({"advantage": "gae"} if valued else {})), fsdp=fsdp)


def step(one: Learner, seed: int) -> dict[str, float]:
    """One step on some rows -> its metrics."""
    shares = pack(rows(6, seed=seed), ranks=dist.get_world_size(), budget=80)
    return one.train(shares[dist.get_rank()], version=VERSION).metrics


def drawn() -> list[float]:
    """A number of each generator."""
    return [float(torch.rand(1)), float(np.random.rand()), random.random()]


def saved(one: Learner, root: Path, number: int, **counters: Any) -> Path:
    saver = CheckpointSaver(root)
    folder = saver.start(one, number, counters)
    saver.wait()
    return folder


def main(folder: Path) -> None:
    init_process_group(FsdpSettings(device="cpu", threads=1))
    seed_all(dist.get_rank())
    out: dict[str, Any] = {}
    one = learner(folder / "model")
    step(one, 1)
    saved(one, folder / "by-two", 1, who="two")
    out["drawn"] = drawn()
    out["next"] = step(one, 2)
    out["weights"] = weights(one)
    load_checkpoint(learner(folder / "other"), folder / "by-two" / "step-00000001")
    out["drawn_again"] = drawn()
    if (folder / "by-one").exists():
        fresh = learner(folder / "other")
        out["counters"] = load_checkpoint(fresh, folder / "by-one" / "step-00000001")
        out["drawn_of_one"] = drawn()
        out["loaded"] = weights(fresh)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, out)
    if dist.get_rank() == 0:
        torch.save(everyone, folder / "two.pt")
    destroy_process_group()

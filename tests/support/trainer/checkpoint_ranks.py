"""Learners, and what each of the two ranks does that `test_save_load` starts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from support.trainer.row_samples import rows
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    OptimSettings,
    build_model,
    destroy_process_group,
    full_tensors,
    init_process_group,
    load_checkpoint,
    shard,
)
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.model import value_head
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.losses import preset

VERSION = 3


def learner(folder: Path, *, valued: bool = False, **fsdp: Any) -> Learner:
    settings = FsdpSettings(device="cpu", **fsdp)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model(folder, settings)
    if valued:
        value_head.attach_value_head(model)
    objective = preset("grpo", advantage="gae") if valued else preset("grpo")
    return Learner(shard(model, mesh, settings), mesh, objective, OptimSettings(lr=1e-2))


def step(one: Learner, seed: int) -> dict[str, float]:
    """One step on some rows -> its metrics."""
    shares = pack(rows(6, seed=seed), ranks=dist.get_world_size(), budget=80)
    return one.train(shares[dist.get_rank()], version=VERSION).metrics


def weights(one: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(one.model)}


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

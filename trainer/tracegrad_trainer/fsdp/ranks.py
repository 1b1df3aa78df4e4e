"""Joining and leaving the process group, and rank 0's rows shared out over it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tracegrad_trainer.batches import MicroBatch, Row, pack

from .settings import FsdpSettings
from .step import Learner, StepResult
from .wrap import pick_device


def start_ranks(settings: FsdpSettings) -> DeviceMesh:
    """Join the process group (torchrun's environment; alone without it) -> mesh of one axis."""
    device = pick_device(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo also where GPUs train: objects and checkpoints travel over it.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=settings.timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def stop_ranks() -> None:
    """Leave the group: together after a good run, at once while an error is on its way out."""
    if not dist.is_initialized():
        return
    # A rank that leaves first can abort the others' last save; one that failed must not wait
    # for ranks that sit in another collective and wait for it.
    if sys.exc_info()[0] is None:
        dist.barrier()
    dist.destroy_process_group()


def train_batch(
    learner: Learner, rows: Sequence[Row] | None, *, version: int, budget: int
) -> StepResult:
    """One optimizer step on rank 0's `rows` (None on the others), packed to `budget` tokens.

    `StepResult.dropped` are indices into `rows`.
    """
    shares: list[list[MicroBatch]] | None = None
    if dist.get_rank() == 0:
        assert rows is not None
        shares = pack(rows, ranks=learner.mesh.size(), budget=budget)
    received: list[list[MicroBatch]] = [[]]
    dist.scatter_object_list(received, shares, src=0)
    return learner.train(received[0], version=version)

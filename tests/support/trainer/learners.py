"""Learners of model folders on the ranks that there are, and how far two of them are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tracegrad_trainer.batches import PackingRule
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    OptimSettings,
    build_sharded,
    full_tensors,
)
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.config import ADAMW, AdamwImplementation
from tracegrad_trainer.engine.context_parallel import ContextParallel
from tracegrad_trainer.engine.model import value_head
from tracegrad_trainer.engine.model.reference import build_reference
from tracegrad_trainer.engine.model.sharded_load import local_index
from tracegrad_trainer.losses import ObjectiveSettings, preset
from tracegrad_trainer.losses.logprob_gap import Precision


def build(
    folder: Path,
    objective: ObjectiveSettings | str = "grpo",
    *,
    fsdp: dict[str, Any] | None = None,
    value_std: float = 0.0,
    reference: Path | nn.Module | None = None,
    elements: int | None = None,
    adamw: AdamwImplementation = ADAMW,
    packing: PackingRule | None = None,
    serving: Precision = "float32",
    **optim: Any,
) -> Learner:
    """With a value head (its weights of this deviation) and a reference where they are needed."""
    objective = preset(objective) if isinstance(objective, str) else objective
    settings = FsdpSettings(device="cpu", **(fsdp or {}))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    context = ContextParallel.of(mesh, settings.context_ranks)
    sharing = ContextParallel.of(mesh, 1 if packing is None else packing.group)
    model: Any = build_sharded(folder, mesh, settings, values="value" in objective.needs)
    if value_std and value_head.has_value_head(model):
        torch.manual_seed(5)
        weight: DTensor = model.value_head.weight
        drawn = nn.init.normal_(torch.empty(weight.shape), std=value_std)
        weight.detach().to_local().copy_(drawn[local_index(weight)])
    if isinstance(reference, Path):
        needed = "reference" in objective.needs
        reference = build_reference(reference, mesh, settings) if needed else None
    return Learner(
        model,
        mesh,
        objective,
        OptimSettings(**({"lr": 1e-2} | optim)),
        reshard=settings.reshard,
        context=context,
        sharing=sharing,
        reference=reference,
        head_elements=elements,
        adamw=adamw,
        packing=packing,
        serving=serving,
    )


def weights(one: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(one.model)}


def save_checkpoint(
    learner: Learner, root: Path, step: int, counters: dict[str, Any], *, keep: int
) -> Path:
    """Write checkpoint `step` on all ranks, drop the oldest beyond `keep` -> folder in `root`.

    Raises:
        CheckpointError: as `CheckpointSaver.wait`.
    """
    saver = CheckpointSaver(root)
    folder = saver.start(learner, step, counters)
    saver.wait()
    saver.prune(keep=keep)
    return folder


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| / |b| over all tensors together."""
    assert list(a) == list(b)
    difference = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((difference / sum(b[name].double().square().sum() for name in b)) ** 0.5)

"""The learner that settings ask for: model, adapters, value head, reference, over a mesh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tracegrad.events import Json
from tracegrad_trainer.batches import PackingRule, RoutingLayout
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import Learner, OptimSettings, build_sharded
from tracegrad_trainer.engine.config import ADAMW, AdamwImplementation
from tracegrad_trainer.engine.context_parallel import ContextParallel
from tracegrad_trainer.engine.distributed import compute_device
from tracegrad_trainer.engine.model import memory, router_replay
from tracegrad_trainer.engine.model.context_trial import check_context_parallel, sharing_ranks
from tracegrad_trainer.engine.model.reference import build_reference
from tracegrad_trainer.losses.logprob_gap import served_precision


def build_learner(
    settings: TrainerSettings,
    mesh: DeviceMesh,
    optim: OptimSettings | None = None,
    *,
    adamw: AdamwImplementation = ADAMW,
    packing: PackingRule | None = None,
) -> Learner:
    """On all ranks; as it is before its first step. `optim` instead of the settings' own, `packing`
    of a step that was recorded.

    Raises:
        ValueError: there is no such model, or it cannot be trained with these settings.
    """
    values = "value" in settings.objective.needs
    context = ContextParallel.of(mesh, settings.fsdp.context_ranks)
    model = build_sharded(settings.model, mesh, settings.fsdp, values=values)
    if context is not None:
        check_context_parallel(model, context, compute_device(mesh))
    reference = None
    if settings.needs_reference_model:
        reference = build_reference(settings.reference_folder, mesh, settings.fsdp)
        if context is not None:
            check_context_parallel(reference, context, compute_device(mesh))
    sharing = None
    if settings.fsdp.context_parallel == "auto":
        models = [model] if reference is None else [model, reference]
        sharing = sharing_ranks(models, mesh, settings.fsdp, packing.group if packing else None)
    elif packing is not None:
        packing = replace(packing, group=1)
    return Learner(
        model,
        mesh,
        settings.objective,
        optim or settings.optim,
        reshard=settings.fsdp.reshard,
        context=context,
        sharing=sharing,
        reference=reference,
        adamw=adamw,
        packing=packing,
        serving=served_precision(settings.vllm.serving_dtype, on_cpu=settings.vllm.on_cpu),
    )


def engine_routing_layout(settings: TrainerSettings) -> RoutingLayout | None:
    """The layout of the serving engine's expert routing, where rows are trained with it (r3).

    Raises:
        ValueError: the model has none.
    """
    if settings.fsdp.routing != "r3":
        return None
    return router_replay.routing_layout_of(memory.meta_model(settings.model))


def folder_vocab_size(folder: Path) -> int | None:
    """How many tokens a folder's model knows, by its config; None: the config lacks it."""
    config: Json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: int | None = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return found


def model_vocab_size(model: nn.Module) -> int:
    """How many tokens a model embeds, sharded or whole."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    found: int = embedding.weight.shape[0]
    return found

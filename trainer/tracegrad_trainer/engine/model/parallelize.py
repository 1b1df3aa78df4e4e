"""The model, and FSDP2 around its blocks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import AutoModelForCausalLM

from tracegrad_trainer.engine.attention import dispatch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import (
    compute_device,
    compute_dtype,
    frozen_dtype,
    pick_device,
    sharding_mesh,
)
from tracegrad_trainer.engine.model import (
    lora,
    memory,
    recurrent_layers,
    router_replay,
    value_head,
)
from tracegrad_trainer.engine.model.activation_memory import save_activation_memory
from tracegrad_trainer.engine.model.compile import compile_blocks
from tracegrad_trainer.engine.model.hf_config import transformer_blocks
from tracegrad_trainer.engine.model.hf_weights import (
    HfWeights,
    missing_tensors,
    readable_by_parts,
)
from tracegrad_trainer.engine.model.sharded_load import empty_model, load_shards

_log = logging.getLogger(__name__)


def build_sharded(
    folder: Path | str,
    mesh: DeviceMesh,
    settings: FsdpSettings,
    *,
    values: bool = False,
    frozen: bool = False,
) -> nn.Module:
    """A transformers causal LM without dropout, sharded over all ranks; each reads its own part.

    What has no safetensors, or quantized ones, is loaded whole by every rank before it is sharded.

    Args:
        values: with a value head.
        frozen: nothing of it is trained.

    Raises:
        ValueError: there is no such model, or the settings are not for it.
    """
    model = empty_model(folder, dispatch.choose_attention(settings, pick_device(settings)))
    weights = None
    if readable_by_parts(Path(folder), model.config):
        weights = HfWeights(Path(folder), model)
        prepare_model(model, settings)
    else:
        _log.warning(
            "model = %r is not in plain safetensors: every rank loads it whole, into the host's"
            " memory, before it is sharded",
            str(folder),
        )
        model = build_model(folder, settings)
    if values:
        value_head.attach_value_head(model)
    if frozen:
        model.requires_grad_(False)
    shard(model, mesh, settings)
    if weights is not None:
        load_shards(model, weights, compute_device(mesh), offload=settings.cpu_offload)
        memory.check_rows_apart(model, compute_device(mesh))
    return model


def build_model(folder: Path | str, settings: FsdpSettings) -> nn.Module:
    """Load a transformers causal LM in float32 into the host's memory, without dropout.

    For one process; `build_sharded` is for many.

    Raises:
        ValueError: there is no such model, or the settings are not for it.
    """
    name = dispatch.choose_attention(settings, pick_device(settings))
    where = f"model = {str(folder)!r}"
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=name,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"{where} cannot be loaded: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{where}: {missing_tensors(missing)}")
    return prepare_model(model, settings)


def prepare_model(model: nn.Module, settings: FsdpSettings) -> nn.Module:
    """Make a causal LM as the settings want it, in place; see `build_model`. It may be without
    storage."""
    # Dropout would make the three log-probability sets differ for no reason, and so would a
    # router's noise: the model never leaves evaluation mode, and cannot drop if one puts it there.
    model.eval()
    _choose_experts(model, settings)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # In some models (BLOOM) it is a module, of those above.
        if isinstance(getattr(module, "attention_dropout", None), int | float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a number, not a module
    memory.check_supported(model)
    recurrent_layers.keep_paths_apart(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        memory.check_rows_apart(model, next(model.parameters()).device)
    if settings.routing != "own":
        router_replay.install_replay(model)
    if settings.lora is not None:
        lora.attach_adapters(model, settings.lora)
    if settings.compile:
        compile_blocks(model)
    save_activation_memory(model, settings)
    return model


def _choose_experts(model: Any, settings: FsdpSettings) -> None:
    """Raises ValueError: the model's experts have no choice, or it has none."""
    if settings.experts == "auto":
        return
    try:
        possible = model._can_set_experts_implementation()
        if possible:
            model.set_experts_implementation(settings.experts)
    except (ValueError, ImportError) as error:
        raise ValueError(f"fsdp.experts = {settings.experts!r}: {error}; set 'eager'") from error
    if not possible:
        raise ValueError(
            f"fsdp.experts = {settings.experts!r}: the experts of {type(model).__name__}, if it has"
            " any, are computed in one way only; set fsdp.experts = 'auto'"
        )


def shard(model: nn.Module, mesh: DeviceMesh, settings: FsdpSettings) -> nn.Module:
    """FSDP2: each transformer block is a unit, the root holds the rest; what is frozen is kept in
    `fsdp.frozen_dtype`. With `fsdp.replicas` as many groups of ranks hold a copy each (HSDP): they
    gather weights among themselves, and only gradients go from one to another. In place.

    Raises:
        ValueError: the model names no blocks, or the ranks cannot be divided so.
    """
    compute = compute_dtype(settings)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(frozen_dtype(settings))
    kept = {parameter.dtype for parameter in model.parameters()}
    policy = MixedPrecisionPolicy(
        param_dtype=None if kept == {compute} else compute,
        reduce_dtype=torch.float32,
        output_dtype=None,
    )
    offload = OffloadPolicy()
    if settings.cpu_offload:
        # Without an accelerator nothing can be pinned, and there is nowhere to copy from.
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    over = sharding_mesh(mesh, settings.replicas)
    common: dict[str, Any] = {"mesh": over, "mp_policy": policy, "offload_policy": offload}
    for block in transformer_blocks(model):
        fully_shard(block, reshard_after_forward=settings.reshard, **common)
    fully_shard(model, reshard_after_forward=False, **common)
    return model


def set_gradient_sync(model: nn.Module, *, last: bool, reshard: bool) -> None:
    """Before a forward: whether its backward reduces gradients and frees parameters."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    if not reshard:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

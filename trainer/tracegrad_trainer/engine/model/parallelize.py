"""The model, and FSDP2 around its blocks."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
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
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from tracegrad_trainer.engine.attention import dispatch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import pick_device
from tracegrad_trainer.engine.model import lora, memory, router_replay
from tracegrad_trainer.engine.model.hf_config import transformer_blocks


def build_model(folder: Path | str, settings: FsdpSettings) -> nn.Module:
    """Load a transformers causal LM in float32 into the host's memory, without dropout.

    `shard` takes it to this rank's device, a block at a time.

    Raises:
        ValueError: there is no such model, or the settings are not for it.
    """
    name = dispatch.choose_attention(settings, pick_device(settings))
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model = {str(folder)!r} cannot be loaded: {error}") from error
    return prepare_model(model, settings)


def prepare_model(model: nn.Module, settings: FsdpSettings) -> nn.Module:
    """Make a causal LM as the settings want it, in place; see `build_model`."""
    # Dropout would make the three log-probability sets differ for no reason, and so would a
    # router's noise: the model never leaves evaluation mode, and cannot drop if one puts it there.
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a number, not a module
    memory.check_supported(model)
    if settings.routing != "own":
        router_replay.install_replay(model)
    if settings.lora is not None:
        lora.attach_adapters(model, settings.lora)
    if settings.gradient_checkpointing:
        for block in transformer_blocks(model):
            # Not transformers' own, which works in training mode only; not torch's wrapper
            # module, which changes the parameters' names.
            block.forward = MethodType(_recomputed, block)
    return model


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner = MethodType(type(block).forward, block)
    # Nothing in the block is random.
    return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def shard(model: nn.Module, mesh: DeviceMesh, settings: FsdpSettings) -> nn.Module:
    """FSDP2: each transformer block is a unit, the root holds the rest. In place.

    Raises:
        ValueError: the model names no blocks.
    """
    compute = getattr(torch, settings.compute_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=torch.float32,
        output_dtype=None,
    )
    offload = OffloadPolicy()
    if settings.cpu_offload:
        # Without an accelerator nothing can be pinned, and there is nowhere to copy from.
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
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

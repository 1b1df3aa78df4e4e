"""The model, and FSDP2 around its blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from . import attention
from .settings import FsdpSettings


def pick_device(settings: FsdpSettings) -> torch.device:
    """This rank's device: of the GPUs the one numbered LOCAL_RANK."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def build_model(folder: Path | str, settings: FsdpSettings) -> nn.Module:
    """Load a transformers causal LM in float32 onto this rank's device, without dropout.

    Raises:
        ValueError: there is no such model.
    """
    name = attention.NAME if settings.attention == "packed" else settings.attention
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name
        )
    except OSError as error:
        raise ValueError(f"model = {str(folder)!r} cannot be loaded: {error}") from error
    # Dropout would make the three log-probability sets differ for no reason.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a number, not a module
    model.eval()
    if settings.gradient_checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in this mode only
    return model.to(pick_device(settings))


def shard(model: nn.Module, mesh: DeviceMesh, settings: FsdpSettings) -> nn.Module:
    """FSDP2: each transformer block is a unit, the root holds the rest. In place."""
    compute = getattr(torch, settings.compute_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=torch.float32,
        output_dtype=None,
    )
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} names no blocks (_no_split_modules): it cannot be sharded"
        )
    return blocks


def between_micro_batches(model: nn.Module, *, last: bool, reshard: bool) -> None:
    """Before a forward: whether its backward reduces gradients and frees parameters."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    if not reshard:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

"""What the blocks keep for backward: all, a part, or their input alone; on the device, or in the
host's memory.

A block's forward is replaced, not the block: wrapper modules change the parameters' names.
(transformers' own checkpointing works in training mode only.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import get_default_op_list
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model.hf_config import transformer_blocks

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.linear.default)
# Beside torch's list of what is expensive; where this torch has them (as torchtitan's list).
_EXPENSIVE = (
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._grouped_mm.default",
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
    "torch_attn._varlen_attn.default",
)
_SMALL = 1024  # elements; not worth a copy of their own


def save_activation_memory(model: nn.Module, settings: FsdpSettings) -> None:
    """`fsdp.gradient_checkpointing` and `fsdp.activation_offloading`, before sharding. In place.

    Raises:
        ValueError: the model writes over what a selective policy keeps.
    """
    selective = settings.gradient_checkpointing == "selective"
    if selective and any(getattr(module, "has_bias", False) for module in model.modules()):
        raise ValueError(
            f"fsdp.gradient_checkpointing = 'selective': {type(model).__name__} adds its experts'"
            " biases to the very products that would be kept: set it to true"
        )
    for block in transformer_blocks(model):
        if settings.gradient_checkpointing:
            how: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
            block.forward = partial(_recomputed, block.forward, how)
        if settings.activation_offloading:
            # Around what is recomputed: its input is offloaded, and no more. What a selective
            # policy keeps is in torch's own hands, on the device, and never here.
            block.forward = partial(_offloaded, block, block.forward)


def _recomputed(forward: Callable[..., Any], how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Nothing in a block is random.
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, **how, **kwargs
    )


def _selective_contexts() -> Any:
    """Attention and every second matrix product are kept, the rest is computed again: torchtitan's
    selective policy by operation."""
    products = {False: 0, True: 0}  # counted in forward and in recomputation

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in _expensive_ops():
            return CheckpointPolicy.PREFER_RECOMPUTE
        if op in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@cache
def _expensive_ops() -> frozenset[Any]:
    torch_list: Any = get_default_op_list().compute_intensive_ops
    found = {op.default for op in torch_list} | {*_PRODUCTS}
    for name in _EXPENSIVE:
        op: Any = torch.ops
        for part in name.split("."):
            op = getattr(op, part, None)
        if op is not None:
            found.add(op)
    return frozenset(found)


def _offloaded(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Of weights FSDP decides itself where they are, and when: whole here, they are freed behind
    # the forward and gathered again for backward.
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def to_host(tensor: Tensor) -> Any:
        if tensor.numel() < _SMALL or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        # Copies both ways are in the order of the device's stream, which need not be waited for.
        pinned = tensor.device.type != "cpu"
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)  # close together
        return tensor.device, host.copy_(tensor, non_blocking=True), tensor.stride()

    def to_device(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, host, strides = kept
        found: Tensor = host.to(device, non_blocking=True)
        if found.stride() == strides or 0 in strides:
            return found
        # Backward of compiled kernels (FlexAttention's too) refuses other strides than were saved.
        return found.new_empty_strided(found.size(), strides).copy_(found)

    with saved_tensors_hooks(to_host, to_device):
        return forward(*args, **kwargs)

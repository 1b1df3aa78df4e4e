"""Whether a model computes the same where ranks share its tokens: by its heads, and by trial."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tracegrad_trainer.engine.attention import dispatch
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.context_parallel import (
    ContextParallel,
    ContextParallelAttention,
    repeats_of,
)
from tracegrad_trainer.engine.distributed import compute_device
from tracegrad_trainer.engine.model import recurrent_layers
from tracegrad_trainer.engine.model.forward import run_inside_forward
from tracegrad_trainer.engine.model.hf_config import layer_configs, query_heads

# Of hidden states, as a share of the largest; bfloat16 has 8 bits.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 0.03


_log = logging.getLogger(__name__)


def sharing_ranks(
    models: Sequence[nn.Module], mesh: DeviceMesh, settings: FsdpSettings, recorded: int | None
) -> ContextParallel | None:
    """Groups of ranks that share rows in the steps that are quicker by it, as large as those of a
    `recorded` step; None: no step is taken so. On all ranks at once.

    Raises:
        ValueError: the recorded step cannot be taken so.
    """
    device = compute_device(mesh)
    size = recorded
    if size is None:
        # Machines may have different numbers of ranks: all of them choose alike.
        local: list[int] = [0] * mesh.size()
        own = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size()))
        torch.distributed.all_gather_object(local, own)
        size = sharing_group(models, settings, device, math.gcd(*local))
    sharing = ContextParallel.of(mesh, size)
    if sharing is None:
        return None
    try:
        for model in models:
            check_context_parallel(model, sharing, device)
    except ValueError as error:
        if recorded is not None:
            raise
        _log.warning("fsdp.context_parallel = 'auto': ranks share no rows: %s", error)
        return None
    return sharing


def sharing_group(
    models: Sequence[nn.Module],
    settings: FsdpSettings,
    device: torch.device,
    local_ranks: int,
) -> int:
    """How many neighbours, of `local_ranks` or a multiple of these on each machine, may share rows
    with `fsdp.context_parallel = "auto"`: the most that all models' heads can be divided by; 1:
    none. Never beyond a machine, where exchanges are an order slower, nor on CPUs.
    """
    ours = settings.attention == "auto" or settings.attention in dispatch.OURS
    if device.type != "cuda" or settings.routing != "own" or not ours:
        return 1
    sizes = [n for n in range(local_ranks, 1, -1) if local_ranks % n == 0]
    return next((n for n in sizes if all(_fits(model, n) for model in models)), 1)


def _fits(model: nn.Module, ranks: int) -> bool:
    try:
        check_heads(model, ranks)
    except ValueError:
        return False
    return True


def check_context_parallel(
    model: nn.Module, context: ContextParallel, device: torch.device
) -> None:
    """On all ranks at once.

    Raises:
        ValueError: the ranks cannot share the model's heads, or slices give other hidden states.
    """
    check_heads(model, context.size)
    apart = run_inside_forward(model, lambda whole: _difference(whole, context, device))
    for module in model.modules():  # blocks stay whole behind a forward without `fsdp.reshard`
        if isinstance(module, FSDPModule):
            module.reshard()
    if apart:
        raise ValueError(
            f"fsdp.context_parallel = {context.size}: {type(model).__name__} looks at a row's other"
            " tokens by more than attention, so that slices of one give other numbers: set it to 1"
        )


def check_heads(model: nn.Module, ranks: int) -> None:
    """Of every layer, whether so many ranks can share its heads; the model may be without storage.

    Raises:
        ValueError: they cannot; names numbers that can.
    """
    if recurrent_layers.is_installed(model):
        raise ValueError(
            f"fsdp.context_parallel = {ranks}: {type(model).__name__} has layers that carry a state"
            " along a row, which ranks cannot share by its tokens: set it to 1"
        )
    for layer in layer_configs(model.config):
        _check_heads(layer, ranks)


def _check_heads(layer: Any, ranks: int) -> None:
    heads, _ = query_heads(layer)
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    if heads % ranks or heads % (kv_heads * repeats_of(kv_heads, ranks)):
        fitting = [n for n in range(1, heads + 1) if _divides(heads, kv_heads, n)]
        raise ValueError(
            f"fsdp.context_parallel = {ranks}: each rank takes some of the {heads} heads of the"
            f" model's attention ({kv_heads} of keys and values): set it to one of {fitting}"
        )


def _divides(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and heads % (kv_heads * repeats_of(kv_heads, ranks)) == 0


@torch.no_grad()
def _difference(model: Any, context: ContextParallel, device: torch.device) -> bool:
    """Two rows, of three tokens and of five, whole and in slices."""
    lengths = [3, 5]
    ids = torch.arange(sum(lengths), device=device)
    places = torch.cat([torch.arange(n, device=device) for n in lengths])
    name = model.config._attn_implementation
    if name == dispatch.VARLEN:  # of its kernel nothing is asked here
        model.config._attn_implementation = dispatch.PACKED

    def hidden(tokens: Tensor, positions: Tensor, rows: dispatch.RowAttention) -> Tensor:
        given = {"input_ids": tokens[None], "position_ids": positions[None], "packed_rows": rows}
        found: Tensor = model.base_model(use_cache=False, **given).last_hidden_state[0]
        return found

    try:
        rows = PackedRowAttention(lengths, device)
        whole = hidden(ids, places, rows)
        here = context.slice_of(len(ids))
        own = [torch.from_numpy(context.shard(x.cpu().numpy())).to(device) for x in (ids, places)]
        part = hidden(own[0], own[1], ContextParallelAttention(rows, len(ids), context))
    finally:
        model.config._attn_implementation = name
    expected = whole[here]
    gap = (part[: len(expected)] - expected).abs()
    most = torch.stack([gap.amax() if gap.numel() else gap.new_zeros(()), whole.abs().amax()])
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)  # all ranks agree
    return bool(most[0] > _TOLERANCE.get(whole.dtype, _COARSE) * most[1])

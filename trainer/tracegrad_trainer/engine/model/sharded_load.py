"""Weights from a model folder into the shards of a model that was made without storage.

A model on the meta device is sharded first; then each rank reads its own part of one tensor after
the other. So a rank never holds more than its shards and what is made into one of them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tracegrad_trainer.engine.model import lora, value_head
from tracegrad_trainer.engine.model.hf_weights import HfWeights, Index
from tracegrad_trainer.engine.model.memory import meta_model


def empty_model(folder: Path | str, attention: str | None = None) -> nn.Module:
    """`meta_model`, but for the buffers that no file holds (as rotary frequencies): they are there.

    Raises:
        ValueError: there is no such model.
    """
    model: Any = meta_model(folder, attention)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # transformers leaves it alone below
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, leaf = _owner(model, name)
        owner._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    made: nn.Module = model
    return made


def load_shards(
    model: nn.Module, weights: HfWeights, device: torch.device, *, offload: bool = False
) -> None:
    """Gives every tensor that is still on the meta device its storage on `device`, with `offload`
    parameters theirs in the host's memory, and what `weights` has of it: of a sharded parameter
    this rank's part. Adapters and a value head begin as ever. In place; not a collective.

    Raises:
        ValueError: a tensor cannot be read.
    """
    named: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for name, tensor in _all_tensors(model):
        if tensor.is_meta:
            named[id(tensor)].append(name)
            tensors[id(tensor)] = tensor
    fresh = lora.fresh_adapters(model)  # in the order of the layers, as parameters are too
    for key, tensor in tensors.items():
        [name, *tied] = named[key]
        index = local_index(tensor)
        if value_head.is_value_parameter(name):
            part = torch.zeros(tensor.shape)[index]
        elif lora.is_adapter_parameter(name):
            drawn, whole = next(fresh)
            assert drawn == name
            part = whole[index]
        else:
            part = weights.read(lora.base_name(name), index)
        # Buffers are where they are computed with: FSDP moves parameters alone.
        hosted = offload and isinstance(tensor, nn.Parameter)
        here = torch.device("cpu") if hosted else device
        part = part.to(here, tensor.dtype, copy=False).contiguous()
        _replace(model, [name, *tied], tensor, part)


def local_index(tensor: Tensor) -> Index:
    """Which part of a tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _all_tensors(model: nn.Module) -> Any:
    """(name, parameter or buffer), tied ones once for each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _replace(model: nn.Module, names: list[str], before: Tensor, part: Tensor) -> None:
    """FSDP finds the new parameters at its first forward (`FSDPParam.reset_sharded_param`)."""
    made = part
    if isinstance(before, DTensor):
        # `from_local` would move what is in the host's memory to the mesh's device.
        made = DTensor(part, before._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if isinstance(before, nn.Parameter):
        made = nn.Parameter(made, requires_grad=before.requires_grad)
    for name in names:
        owner, leaf = _owner(model, name)
        setattr(owner, leaf, made)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf

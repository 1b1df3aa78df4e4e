"""A buffer of GPU memory as another process opens it: CUDA's handle, as JSON and back.

torch hands over a tuple for `rebuild_cuda_tensor`, and vLLM's own client pickles it, which its
server unpickles only with VLLM_ALLOW_INSECURE_SERIALIZATION=1: whoever reaches its port could then
run code. Of a flat buffer of bytes nothing in the tuple needs that.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import torch

# What vLLM's workers put their own device's number in place of.
DEVICE = 6


class RebuildArguments(NamedTuple):
    """Of `torch.multiprocessing.reductions.rebuild_cuda_tensor` in torch 2.13, by its names."""

    tensor_cls: type
    tensor_size: torch.Size
    tensor_stride: tuple[int, ...]
    tensor_offset: int
    storage_cls: type
    dtype: torch.dtype
    storage_device: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    requires_grad: bool
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


def encode_handle(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Of a one-dimensional uint8 tensor on a GPU: what `reduce_tensor` gives for it."""
    found = RebuildArguments(*arguments)
    assert found.dtype is torch.uint8, found.dtype
    assert tuple(found.tensor_stride) == (1,), found.tensor_stride
    encoded: dict[str, Any] = {"tensor_size": found.tensor_size[0]}
    for name, kind in _SENT.items():
        value = getattr(found, name)
        encoded[name] = base64.b64encode(value).decode("ascii") if kind is bytes else kind(value)
    return encoded


def decode_handle(encoded: dict[str, Any]) -> RebuildArguments:
    """Raises ValueError: it is no such handle."""
    try:
        sent: dict[str, Any] = {
            name: base64.b64decode(encoded[name], validate=True)
            if kind is bytes
            else kind(encoded[name])
            for name, kind in _SENT.items()
        }
        size = int(encoded["tensor_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"handles: one is no handle of GPU memory: {error!r}") from error
    return RebuildArguments(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([size]),
        tensor_stride=(1,),
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        requires_grad=False,
        **sent,
    )


# What differs from one flat buffer to another, beside its size.
_SENT: dict[str, type] = {
    "tensor_offset": int,
    "storage_device": int,
    "storage_handle": bytes,
    "storage_size_bytes": int,
    "storage_offset_bytes": int,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}

"""Tensors of safetensors files as a few large pieces of bytes, and back.

Rank 0 reads them, and says first which tensors each bucket holds, in which order; the workers of
an engine receive them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tracegrad_trainer.config.push_transport import BUCKET_BYTES
from tracegrad_trainer.inference.transfer_group import TransferGroup

# What a running engine is given between two of its forward passes: some 5 ms on one core of a CPU.
PART_BYTES = 8 << 20
# Bytes that each tensor of a bucket begins at a multiple of. What ends elsewhere ends its bucket:
# between the tensors there is nothing, as vLLM's own packed transfers have it.
ALIGNMENT = 16


class TensorSpec(NamedTuple):
    """As JSON: a list of these three. `dtype`: torch's name of it, such as bfloat16."""

    name: str
    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name}: {self.dtype!r} is no dtype of torch")
        return dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


Bucket = list[TensorSpec]


class BucketReader:
    """Opened files, to read in buckets of 64 MiB, or one tensor. Closed as a context."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises OSError, ValueError: one of them is no safetensors file."""
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.specs: list[TensorSpec] = []
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                self._stack.close()
                raise ValueError(f"{path}: {error}") from error
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                self.specs.append(TensorSpec.of(name, file.get_tensor(name)))  # mapped, not read
                self._files[name] = file
        self.buckets = in_buckets(self.specs)

    def read(self, *, pinned: bool = False) -> Iterator[Tensor]:
        """Each bucket's bytes, of uint8, in host memory. The next one takes its place."""
        largest = max(map(bucket_bytes, self.buckets), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=pinned)
        for bucket in self.buckets:
            flat = buffer[: bucket_bytes(bucket)]
            for spec, place in zip(bucket, places(bucket), strict=True):
                tensor = self._files[spec.name].get_tensor(spec.name)
                flat[place].copy_(tensor.reshape(-1).view(torch.uint8))
            yield flat

    def __enter__(self) -> BucketReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def names_in_parts(paths: Sequence[str]) -> list[list[str]]:
    """Of the tensors in these files, 8 MiB, or one of them, at a time. Raises as `BucketReader`."""
    with BucketReader(paths) as files:
        return [[spec.name for spec in part] for part in in_buckets(files.specs, PART_BYTES)]


def in_buckets(specs: Sequence[TensorSpec], bucket_bytes: int | None = None) -> list[Bucket]:
    buckets: list[Bucket] = []
    room = 0
    for spec in specs:
        if not buckets or spec.nbytes > room:
            buckets.append([])
            room = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        buckets[-1].append(spec)
        room = room - spec.nbytes if spec.nbytes % ALIGNMENT == 0 else -1
    return buckets


def places(bucket: Sequence[TensorSpec]) -> list[slice]:
    """Of each tensor's bytes."""
    begins = accumulate((spec.nbytes for spec in bucket), initial=0)
    return [slice(begin, begin + spec.nbytes) for begin, spec in zip(begins, bucket, strict=False)]


def bucket_bytes(bucket: Sequence[TensorSpec]) -> int:
    return int(places(bucket)[-1].stop)


def unpack(flat: Tensor, bucket: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Views of `flat`, a bucket's bytes."""
    for spec, place in zip(bucket, places(bucket), strict=True):
        yield spec.name, flat[place].view(spec.torch_dtype).view(spec.shape)


def receive(group: TransferGroup, buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """What rank 0 broadcasts of them, each bucket in memory of its own: who asks for the next one
    may still use this one.

    Raises:
        TransferError: rank 0 has ended, or takes too long.
    """
    for bucket in buckets:
        flat = torch.empty(bucket_bytes(bucket), dtype=torch.uint8, device=group.device)
        group.broadcast(flat)
        yield from unpack(flat, bucket)

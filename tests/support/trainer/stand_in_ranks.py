"""This process as any one of many ranks: meshes and shards are that rank's, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[DeviceMesh]:
    """The mesh of all of them. A collective returns at once; what it would bring is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()

"""This rank's device, and joining and leaving the process group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.rendezvous import meet_ranks


def pick_device(settings: FsdpSettings) -> torch.device:
    """This rank's device: of the GPUs the one numbered LOCAL_RANK."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def compute_dtype(settings: FsdpSettings, device: torch.device | None = None) -> torch.dtype:
    """In which forward and backward are computed, by default on this rank's device."""
    return _resolved(settings.compute_dtype, device or pick_device(settings))


def frozen_dtype(settings: FsdpSettings) -> torch.dtype:
    """In which weights that are never trained are kept."""
    return _resolved(settings.frozen_dtype, pick_device(settings))


def _resolved(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found: torch.dtype = getattr(torch, name)
    return found


def resolved_dtypes(settings: FsdpSettings) -> dict[str, str]:
    """Both by their settings' names, as a step is recorded with them: on another machine "auto"
    may be something else."""
    found = {"compute_dtype": compute_dtype(settings), "frozen_dtype": frozen_dtype(settings)}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def compute_device(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes; with `cpu_offload` its parameters are elsewhere between steps."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def take_peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors took on a GPU since the last call; None: it is no GPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def release_cached_memory(device: torch.device) -> None:
    """What tensors took of a GPU and nothing has now: others may take it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def init_process_group(settings: FsdpSettings) -> DeviceMesh:
    """Join the process group (torchrun's environment; alone without it) -> mesh of one axis."""
    device = pick_device(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision(settings.float32_matmul)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo also where GPUs train: objects and checkpoints travel over it.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=settings.timeout_s)
    if "RANK" in os.environ:
        store, rank, ranks = meet_ranks(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def group_timeout() -> timedelta | None:
    """`fsdp.timeout_s`, as the group of all ranks has it; torch gives other groups half an hour.
    None: the backend knows none."""
    assert dist.group.WORLD is not None
    options: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options
    return None if options is None else options._timeout


def new_mesh(ranks: DeviceMesh, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks over other axes, whose groups have the same timeout. A collective."""
    mesh = init_device_mesh(ranks.device_type, shape, mesh_dim_names=names)
    if (timeout := group_timeout()) is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
    return mesh


def not_divisible(ranks: int, field: str, size: int) -> str | None:
    """What to say where they cannot be divided by a setting."""
    if ranks % size == 0:
        return None
    return (
        f"fsdp.{field} = {size}: {ranks} ranks cannot be divided by it; set it, or ranks, so that"
        " they can"
    )


def sharding_mesh(ranks: DeviceMesh, replicas: int) -> DeviceMesh:
    """Over which a model is sharded: all ranks, or with `replicas` (HSDP) neighbours, which hold
    one copy together; axes "replicate" and "shard". A collective.

    Raises:
        ValueError: the ranks cannot be divided so.
    """
    if replicas == 1:
        return ranks
    check_replicas(ranks.size(), replicas)
    shape = (replicas, ranks.size() // replicas)
    return new_mesh(ranks, shape, ("replicate", "shard"))


def check_replicas(ranks: int, replicas: int) -> None:
    """Raises ValueError: so many ranks cannot hold so many copies of a model."""
    if ranks % replicas:
        possible = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"fsdp.replicas = {replicas}: {ranks} ranks cannot hold as many copies of the model,"
            f" each on as many ranks: set it to one of {possible}"
        )


def destroy_process_group() -> None:
    """Leave the group: together after a good run, at once while an error is on its way out."""
    if not dist.is_initialized():
        return
    # A rank that leaves first can abort the others' last save; one that failed must not wait
    # for ranks that sit in another collective and wait for it.
    failed = sys.exc_info()[0] is not None
    if not failed:
        dist.barrier()
    elif dist.get_world_size() > 1 and "nccl" in dist.get_backend_config():
        # NCCL's end waits for what is under way, and so for those ranks, up to `fsdp.timeout_s`.
        # The end of the process aborts it.
        return
    dist.destroy_process_group()

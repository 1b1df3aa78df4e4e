"""What each rank does in `test_lora_two_ranks`; writes what rank 0 saw to `<folder>/<ranks>.pt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from support.trainer.row_samples import rows
from support.trainer.tiny_models import logprobs
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.config import FsdpSettings, LoraSettings
from tracegrad_trainer.engine.model.lora import (
    adapter_tensors,
    merged_tensors,
    save_adapter,
    without_adapters,
)
from tracegrad_trainer.engine.model.parallelize import build_model, shard


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {f"reshard={reshard}": trained(folder, reshard) for reshard in (True, False)}
    if dist.get_rank() == 0:
        torch.save(seen, folder / f"{dist.get_world_size()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def trained(folder: Path, reshard: bool) -> dict[str, Any]:
    """Two steps of SGD on every rank's own rows, the reference asked between them."""
    settings = FsdpSettings(
        device="cpu", lora=LoraSettings(rank=2, alpha=8), cpu_offload=reshard, reshard=reshard
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(build_model(folder / "model", settings), mesh, settings)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005)
    every = micro_batch(rows(4), range(4))
    share = rows(4)[dist.get_rank() :: dist.get_world_size()]
    out: dict[str, Any] = {"sharded": all(isinstance(p, DTensor) for p in model.parameters())}
    out["before"] = _asked(model, every)
    for _ in range(2):
        with without_adapters(model), torch.no_grad():
            out["reference"] = logprobs(model, every)
        # FSDP takes the mean over ranks.
        (logprobs(model, micro_batch(share, range(len(share)))).sum() * mesh.size()).backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    out["after"] = _asked(model, every)
    out["adapter"] = _cloned(adapter_tensors(model))
    out["merged"] = _cloned(merged_tensors(model))
    save_adapter(model, folder / f"adapter-{dist.get_world_size()}")
    return out


@torch.no_grad()
def _asked(model: torch.nn.Module, batch: Any) -> Tensor:
    return logprobs(model, batch)


def _cloned(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}

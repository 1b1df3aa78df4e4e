"""What each rank does in `test_sharded_load`; `<folder>/<ranks>-<rank>.json` gets what it saw."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from support.trainer.row_samples import rows
from support.trainer.tiny_models import logprobs
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.config import FsdpSettings, LoraSettings
from tracegrad_trainer.engine.model import memory as memory_checks
from tracegrad_trainer.engine.model.lora import base_name, is_adapter_parameter, merged_tensors
from tracegrad_trainer.engine.model.parallelize import build_model, build_sharded
from tracegrad_trainer.engine.model.reference import build_reference
from tracegrad_trainer.engine.model.sharded_load import local_index

CPU = FsdpSettings(device="cpu")
LORA = CPU.model_copy(update={"lora": LoraSettings(rank=2)})
HALF = LORA.model_copy(update={"frozen_dtype": "bfloat16"})


def main(folder: Path, names: list[str], large: str, rounded: str) -> None:
    """`rounded`: a model whose files are in bfloat16."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seen: dict[str, Any] = {"memory": memory(folder / large, mesh, folder / names[0])}
    seen["differ"] = {name: differing(folder / name, mesh) for name in names}
    seen["adapted"] = differing(folder / names[0], mesh, LORA, values=True)
    seen["half"] = half(folder / names[0], mesh)
    seen["reference"] = reference(folder / rounded, mesh)
    (folder / f"{mesh.size()}-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def differing(
    folder: Path, mesh: DeviceMesh, settings: FsdpSettings = CPU, *, values: bool = False
) -> list[str]:
    """Tensors of which this rank holds something else than its part of the plain load's, and
    "forward" where the model computes something else."""
    whole = build_model(folder, settings)
    model = build_sharded(folder, mesh, settings, values=values)
    expected, found = _tensors(whole), _tensors(model)
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in found
        or not torch.equal(_part(found[name]), tensor[local_index(found[name])])
    ]
    heads = {"value_head.weight", "value_head.bias"} if values else set()
    wrong += [name for name in heads if _part(found[name]).any()]
    wrong += list(found.keys() - expected.keys() - heads)
    wrong += [name for name in heads | expected.keys() if found[name].is_meta]
    batch = micro_batch(rows(2), range(2))
    with torch.no_grad():
        apart = (logprobs(model, batch) - logprobs(whole, batch)).abs().max()
    return wrong + (["forward"] if apart > 1e-5 else [])


def half(folder: Path, mesh: DeviceMesh) -> dict[str, list[str]]:
    """The kinds of frozen and of trained parameters, and what of the frozen ones is not the
    file's, rounded."""
    model = build_sharded(folder, mesh, HALF)
    whole = _tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    named = dict(model.named_parameters())
    logprobs(model, micro_batch(rows(2), range(2))).sum().backward()
    return {
        "frozen": sorted({str(p.dtype) for p in named.values() if not p.requires_grad}),
        "trained": sorted({str(p.dtype) for p in named.values() if p.requires_grad}),
        "without gradient": [n for n, p in named.items() if p.requires_grad and p.grad is None],
        "served": sorted({str(tensor.dtype) for _, tensor in merged_tensors(model)}),
        "differ": [
            name
            for name, tensor in named.items()
            if not is_adapter_parameter(name)
            and not torch.equal(_part(tensor), whole[base_name(name)][local_index(tensor)])
        ],
    }


def reference(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """How a reference policy is kept, and how far it is from one in float32."""
    batch = micro_batch(rows(2), range(2))
    found = {}
    for dtype in ("float32", "bfloat16"):
        settings = CPU.model_copy(update={"frozen_dtype": dtype})
        model = build_reference(folder, mesh, settings)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        kept = {str(parameter.dtype) for parameter in model.parameters()}
        with torch.no_grad():
            found[dtype] = logprobs(model, batch)
    apart = (found["float32"] - found["bfloat16"]).abs().max()
    return {"kept": sorted(kept), "apart": float(apart)}


def memory(folder: Path, mesh: DeviceMesh, small: Path) -> dict[str, float]:
    """MiB by which this process's peak rises when a model is loaded; of the model, of this rank's
    shards and of the largest of them."""
    build_sharded(small, mesh, CPU)  # what is made once for any model
    before = _peak()
    with patch.object(memory_checks, "check_rows_apart"):  # a forward, with its own memory
        parameters = list(build_sharded(folder, mesh, CPU).parameters())
    sizes = [_part(parameter).numel() * 4 / 2**20 for parameter in parameters]
    whole = sum(parameter.numel() for parameter in parameters) * 4 / 2**20
    return {"rise": _peak() - before, "whole": whole, "own": sum(sizes), "largest": max(sizes)}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

"""Collectives over all GPUs: right sums, and how fast. With one GPU: that NCCL starts at all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bench.gpu_check.check import Finding, Machine, judged
from bench.pages import our_path
from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group
from tracegrad_trainer.engine.distributed import compute_device
from tracegrad_trainer.launch.torchrun import torchrun_command
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

BYTES, TINY_BYTES = 256 << 20, 1 << 16


def check(machine: Machine) -> Finding:
    ranks = torch.cuda.device_count() if machine.is_gpu else 2
    out = machine.folder / "ranks.json"
    out.unlink(missing_ok=True)
    size = str(TINY_BYTES if machine.tiny else BYTES)
    command = torchrun_command(
        ranks, "bench.gpu_check.collectives", machine.fsdp_device, size, str(out)
    )
    child = ChildProcess("collectives", command, log=machine.folder / "ranks.log", env=our_path())
    child.start()
    try:
        child.wait_until_ready(out.exists, timeout_s=120)
    except ChildError as error:
        return Finding(verdict="wrong", said=str(error))
    finally:
        child.stop()
    found: dict[str, list[float]] = json.loads(out.read_text())
    return judge_collectives(ranks, found)


def judge_collectives(ranks: int, found: Mapping[str, Sequence[float]]) -> Finding:
    """Of one rank the speed is that of a copy, which says nothing."""
    rows = [
        [name, f"{off:.0e}", f"{speed:.1f}" if ranks > 1 and speed else "–"]
        for name, (off, speed) in found.items()
    ]
    right = all(off == 0 for off, _ in found.values())
    said = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return judged(right, said, ("collective", "off", "GB/s a rank"), rows)


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    device, size, out = arguments
    mesh = init_process_group(FsdpSettings.model_validate({"device": device, "threads": 1}))
    here, ranks, rank = compute_device(mesh), dist.get_world_size(), dist.get_rank()
    count = int(size) // 4 // ranks * ranks
    ours = torch.full((count,), float(rank + 1), device=here)
    every = torch.empty(count * ranks, device=here)
    part = torch.empty(count // ranks, device=here)
    total = ranks * (ranks + 1) / 2
    by_rank = torch.arange(1, ranks + 1, device=here).float()
    rows = by_rank[:, None]
    tried: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor | float]] = {
        "all_reduce": (lambda: _reduced(ours.clone()), total),
        "all_gather": (lambda: _gathered(ours, every).view(ranks, -1), rows),
        "reduce_scatter": (lambda: _scattered(ours, part), total),
        "all_to_all": (lambda: _exchanged(ours).view(ranks, -1), rows),
    }
    found = {}
    for name, (work, wanted) in tried.items():
        off = float((work() - wanted).abs().max())
        _wait(here)
        dist.barrier()
        began = time.perf_counter()
        work()
        _wait(here)
        found[name] = [off, count * 4 / (time.perf_counter() - began) / 1e9]
    objects = [None] * ranks
    dist.all_gather_object(objects, rank)
    found["objects"] = [float(objects != list(range(ranks))), 0.0]
    if rank == 0:
        partial = Path(out).with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.rename(out)
    destroy_process_group()
    return 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _gathered(x: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
    dist.all_gather_into_tensor(every, x)
    return every


def _scattered(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    dist.reduce_scatter_tensor(part, x)
    return part


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    other = torch.empty_like(x)
    dist.all_to_all_single(other, x)
    return other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

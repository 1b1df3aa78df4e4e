"""Pushes by each transport that this machine has the GPUs for: whether what is served is what was
pushed, and whether a push that lacks a block would show."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.check import Finding, Machine, judged
from bench.trainer.served_precision import (
    load_small,
    perturbed,
    save_small_model,
    served_gap,
    small_engine,
)
from tracegrad_trainer.config.push_transport import Transport
from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group
from tracegrad_trainer.engine.model.parallelize import build_sharded
from tracegrad_trainer.inference.control_routes import PushError, VllmControl
from tracegrad_trainer.inference.live_weights import LiveWeights
from tracegrad_trainer.inference.m2n_push import LiveShards, M2nControl, M2nSender, m2n_missing
from tracegrad_trainer.inference.transports import ControlOf, transport_of
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_ipc import IpcControl
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.losses.logprob_gap import served_precision

HEADER = ("transport", "seconds to load", "median gap", "right push", "first block stale", "")


def check(machine: Machine) -> Finding:
    """vLLM is on the first GPU, the pushing process on the last."""
    folder, state = machine.folder / "pushed-model", machine.folder / "pushed-state"
    for left in (folder, state):
        shutil.rmtree(left, ignore_errors=True)
    save_small_model(folder)
    settings = small_engine("bfloat16" if machine.is_gpu else "float32", folder, state)
    gpus = torch.cuda.device_count() if machine.is_gpu else 0
    device = torch.device("cuda", gpus - 1) if gpus else torch.device("cpu")
    rows = []
    with VllmProcess(settings, [0] if gpus else None) as engine:
        engine.wait_healthy()
        for number, (name, lacks) in enumerate(transports(gpus).items()):
            if lacks:
                rows.append([name, "", "", "not run", "not run", lacks])
                continue
            try:
                rows.append(_pushed(name, settings, folder, device, 1 + 2 * number))
            except (PushError, RuntimeError, ValueError) as error:
                rows.append([name, "", "", "failed", "failed", str(error)[:120]])
    return judge_pushes(rows)


def transports(gpus: int) -> dict[Transport, str]:
    """By name what is missing for it, if something is."""
    found: dict[Transport, str] = {"files": "", "gloo": ""}
    found["ipc"] = "" if gpus else "needs a GPU"
    two = "" if gpus > 1 else "needs two GPUs"
    found["nccl"] = two
    found["nccl_m2n"] = two or (f"needs {lacks}" if (lacks := m2n_missing()) else "")
    return found


def judge_pushes(rows: list[list[str]]) -> Finding:
    """Right: of what was run each right push is within its bounds, and each stale one is refused;
    nothing went by files that should not."""
    ran = [row for row in rows if row[3] != "not run"]
    wrong = [row[0] for row in ran if (row[3], row[4], row[5]) != ("within", "refused", "")]
    left = [row[0] for row in rows if row[3] == "not run"]
    said = f"{len(ran) - len(wrong)} of {len(ran)} transports push what is served"
    said += f", not {', '.join(wrong)}" if wrong else ""
    said += f"; not run: {', '.join(left)}" if left else ""
    return judged(not wrong, said, HEADER, rows)


def _pushed(
    name: Transport, settings: Any, folder: Path, device: torch.device, version: int
) -> list[str]:
    controls: list[VllmControl] = []
    allowed = served_precision(settings.serving_dtype, on_cpu=settings.on_cpu)
    new, stale = (perturbed(load_small(folder), version + i) for i in (0, 1))
    wanted = perturbed(load_small(folder), version + 1)
    stale.model.layers[0].load_state_dict(new.model.layers[0].state_dict())
    with _transport(name, settings, folder, device) as (transport, before_push):

        def noted(url: str, timeout_s: float) -> VllmControl:
            controls.append(transport(url, timeout_s))
            return controls[-1]

        with WeightPusher(
            settings.url, checkpoint=folder, transport=noted, timeout_s=120
        ) as pusher:
            before_push(version, new)
            report = pusher.push(version, named(new))
            gap, right = served_gap(settings.url, new, allowed)
            before_push(version + 1, stale)
            pusher.push(version + 1, named(stale))
            _, wrong = served_gap(settings.url, wanted, allowed)
    note = "by files" if any(isinstance(c, IpcControl) and c.by_files for c in controls) else ""
    return [name, f"{report.seconds['load']:.2f}", f"{gap.p50:.1e}", right, wrong, note]


def named(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


BeforePush = Callable[[int, Any], None]


@contextmanager
def _transport(
    name: Transport, settings: Any, folder: Path, device: torch.device
) -> Iterator[tuple[ControlOf, BeforePush]]:
    """And what this process does with weights before it pushes them: of shards it has a model."""
    if name == "nccl_m2n":
        with _one_rank(settings, folder) as found:
            yield found
    elif name == "ipc":
        yield whole_model(settings, device, [torch.device("cuda", 0)])
    else:
        yield transport_of(name, device), lambda version, model: None


def whole_model(
    settings: Any, device: torch.device, engine_devices: Sequence[torch.device]
) -> tuple[ControlOf, BeforePush]:
    """Of a rank that has the whole model on its GPU, to an engine on these."""
    held: dict[str, torch.Tensor] = {}
    live = LiveWeights(lambda order: None, lambda: iter(held.items()), lambda gathered: gathered)
    dtype = getattr(torch, settings.weights_dtype)

    def take(version: int, new: Any) -> None:
        live.version = version
        for name, tensor in named(new):
            held[name] = tensor.to(device, dtype if tensor.ndim >= 2 else None)

    return partial(IpcControl, device=device, engine_devices=engine_devices, live=live), take


@contextmanager
def _one_rank(settings: Any, folder: Path) -> Iterator[tuple[ControlOf, BeforePush]]:
    from tracegrad_trainer.inference.m2n_source import LearnerSource

    os.environ["LOCAL_RANK"] = str(torch.cuda.device_count() - 1)
    fsdp = FsdpSettings(device="cuda")
    mesh = init_process_group(fsdp)
    device = torch.device("cuda", torch.cuda.current_device())
    model = build_sharded(folder, mesh, fsdp)
    dtype = getattr(torch, settings.weights_dtype)
    sender = M2nSender(LearnerSource(model, dtype, device), device, 120.0)
    live = LiveShards(sender, lambda order: None)  # there are no other ranks

    def take(version: int, new: Any) -> None:
        live.version = version
        weights = dict(new.named_parameters())
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.to_local().copy_(weights[key])  # type: ignore[attr-defined]

    try:
        yield partial(M2nControl, device=device, live=live, tensor_parallel=1), take
    finally:
        destroy_process_group()

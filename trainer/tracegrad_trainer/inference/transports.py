"""`push.transport` as what drives an engine in a push."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tracegrad_trainer.config.push_transport import Transport, engine_devices
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.inference.control_routes import VllmControl
from tracegrad_trainer.inference.live_weights import LiveWeights
from tracegrad_trainer.inference.m2n_push import LiveShards, M2nControl
from tracegrad_trainer.inference.weight_broadcast import BroadcastControl
from tracegrad_trainer.inference.weight_ipc import IpcControl

ControlOf = Callable[[str, float], VllmControl]


def transport_of(
    name: Transport,
    device: torch.device,
    with_ranks: ControlOf | None = None,
) -> ControlOf:
    """For a `WeightPusher` whose process has `device`: of an engine's URL and `timeout_s`.
    `with_ranks`: what ipc and nccl_m2n are, in which all ranks take part.

    Raises:
        ValueError: it goes from GPU to GPU, and there is none.
    """
    if name == "files":
        return VllmControl
    if name != "gloo" and device.type != "cuda":
        raise ValueError(
            f"push.transport = {name!r} goes from GPU to GPU, and the ranks train on {device.type};"
            " set push.transport = 'gloo', or 'files'"
        )
    if name == "ipc" or name == "nccl_m2n":
        assert with_ranks is not None
        return with_ranks
    return partial(BroadcastControl, backend=name, device=device)


def of_ranks(
    name: Transport,
    settings: TrainerSettings,
    device: torch.device,
    live: LiveWeights | LiveShards,
) -> ControlOf | None:
    """A transport in which all ranks take part; None: `name` is none.

    Raises:
        ValueError: ipc, and nobody has planned who is on which GPU.
    """
    if isinstance(live, LiveShards):
        size = settings.vllm.tensor_parallel or 1
        return partial(M2nControl, device=device, live=live, tensor_parallel=size)
    if name != "ipc":
        return None
    gpus = [torch.device("cuda", gpu) for gpu in engine_devices(settings)]
    return partial(IpcControl, device=device, engine_devices=gpus, live=live)

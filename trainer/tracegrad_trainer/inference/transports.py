"""`push.transport` as what drives an engine in a push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tracegrad_trainer.config.push_transport import Transport
from tracegrad_trainer.inference.control_routes import VllmControl
from tracegrad_trainer.inference.weight_broadcast import BroadcastControl
from tracegrad_trainer.inference.weight_ipc import IpcControl

ControlOf = Callable[[str, float], VllmControl]


def transport_of(
    name: Transport,
    device: torch.device,
    engine_devices: Sequence[torch.device] = (),
    shards: ControlOf | None = None,
) -> ControlOf:
    """For a `WeightPusher` whose process has `device`: of an engine's URL and `timeout_s`.
    `engine_devices`: for ipc, the GPUs of the engine. `shards`: nccl_m2n's, which is of all ranks.

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
    if name == "ipc":
        return partial(IpcControl, devices=engine_devices)
    if name == "nccl_m2n":
        assert shards is not None
        return shards
    return partial(BroadcastControl, backend=name, device=device)

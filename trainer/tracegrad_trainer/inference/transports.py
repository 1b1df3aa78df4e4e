"""`push.transport` as what drives an engine in a push."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tracegrad_trainer.config.push_transport import Transport
from tracegrad_trainer.inference.control_routes import VllmControl
from tracegrad_trainer.inference.weight_broadcast import BroadcastControl

ControlOf = Callable[[str, float], VllmControl]


def transport_of(
    name: Transport,
    device: torch.device,
    of_ranks: ControlOf | None = None,
) -> ControlOf:
    """For a `WeightPusher` whose process has `device`: of an engine's URL and `timeout_s`.
    `of_ranks`: what ipc and nccl_m2n are, in which all ranks take part.

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
        assert of_ranks is not None
        return of_ranks
    return partial(BroadcastControl, backend=name, device=device)

"""How pushed weights reach vLLM, where `push.transport` leaves it open, and what `ipc` sees.

Pure: settings in, a name out. The table is in docs/training.md.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from tracegrad.urls import unix_socket

if TYPE_CHECKING:
    from tracegrad_trainer.config.trainer import TrainerSettings

Transport = Literal["files", "gloo", "nccl", "ipc", "nccl_m2n"]
# Of weights that are sent in pieces; or one tensor, where that is larger.
BUCKET_BYTES = 64 << 20


def choose_transport(
    settings: TrainerSettings, *, engine_on_gpu: bool, train_on_gpu: bool
) -> Transport:
    """What is asked for; or by where engines and ranks are: `ipc` between GPUs of this machine and
    `nccl` to other machines', `gloo` to others where one of both is on a CPU, and files elsewhere.

    Adapters are files. So are pushes to several servers of this machine, whose GPUs are not known
    here, and to other machines that see a `push.folder`.
    """
    if settings.push.transport != "auto":
        return settings.push.transport
    gpus = engine_on_gpu and train_on_gpu
    if settings.vllm.adapter is not None:
        return "files"
    if not all(map(is_local, settings.engine_urls)):
        if settings.push.folder is not None:
            return "files"
        return "nccl" if gpus else "gloo"
    alone = not settings.vllm.urls and not settings.push.engines
    return "ipc" if gpus and alone else "files"


def check_transport(transport: str, *, engine_on_gpu: bool) -> None:
    """Raises ValueError: it goes from GPU to GPU, and vLLM is on none."""
    if transport in ("nccl", "ipc", "nccl_m2n") and not engine_on_gpu:
        raise ValueError(
            f"push.transport = {transport!r} goes from GPU to GPU, and vLLM serves on a CPU;"
            " set push.transport = 'gloo', or 'files'"
        )


def is_local(url: str) -> bool:
    """Whether it is this machine for certain: a Unix socket, or a loopback address."""
    host = urlsplit(url).hostname
    if unix_socket(url) is not None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def visible_gpus(settings: TrainerSettings) -> tuple[int, ...] | None:
    """That the ranks' processes see: those that they train on first, by their numbers, and with
    `ipc` vLLM's too, whose memory rank 0 opens. None: nothing was planned, and they see all."""
    train, engine = settings.gpus.train_gpus, settings.gpus.vllm_gpus
    if train is None or engine is None or settings.push.transport != "ipc":
        return train
    return (*train, *(gpu for gpu in engine if gpu not in train))


def engine_devices(settings: TrainerSettings) -> Sequence[int]:
    """The engine's GPUs, as the ranks' processes number them."""
    visible, engine = visible_gpus(settings), settings.gpus.vllm_gpus
    if visible is None or engine is None:
        raise ValueError(
            "push.transport = 'ipc' needs GPUs that `trainer serve` has planned, for vLLM and for"
            " the ranks; set push.transport = 'nccl', or 'files'"
        )
    return [visible.index(gpu) for gpu in engine]

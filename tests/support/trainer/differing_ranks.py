"""Jobs of ranks that read other settings than rank 0."""

from __future__ import annotations

import re
import socket

import pytest
import torch.distributed as dist

from tracegrad_trainer.utils.distributed import check_same_settings


def other_settings_are_named() -> None:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        check_same_settings({"seed": 1, "optim": {"lr": 1e-5, "betas": [0.9, 0.99]}, "lora": {}})
        own = {"seed": 1, "optim": {"lr": 1e-5 * (1 + rank)}} | ({"lora": None} if rank else {})
        named = f"lora of rank 1 ({socket.gethostname()}), optim.lr of rank 1"
        with pytest.raises(ValueError, match=re.escape(named)):
            check_same_settings(own)
    finally:
        dist.destroy_process_group()

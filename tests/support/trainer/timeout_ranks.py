"""What each of two ranks does in `test_distributed`: how long its groups wait."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tracegrad_trainer.engine import FsdpSettings, destroy_process_group, init_process_group
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.context_parallel import ContextParallel
from tracegrad_trainer.engine.distributed import sharding_mesh


def every_group_waits(seconds: float, folder: Path) -> None:
    """Asserts that all groups of a rank wait for so long."""
    ranks = init_process_group(FsdpSettings(device="cpu", threads=1, timeout_s=seconds))
    context = ContextParallel.of(ranks, 2)
    assert context is not None
    groups: list[Any] = [
        dist.group.WORLD,
        *sharding_mesh(ranks, 2).get_all_groups(),
        *context.mesh.get_all_groups(),
        CheckpointSaver(folder)._group,
    ]
    assert len(set(groups)) == 4, "two of them are all ranks' own"
    waits = [one._get_backend(torch.device("cpu")).options._timeout for one in groups]
    assert waits == [timedelta(seconds=seconds)] * 6
    destroy_process_group()

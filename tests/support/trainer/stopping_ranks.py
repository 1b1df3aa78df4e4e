"""Jobs of ranks whose rank 0 ends the run."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from tracegrad_trainer.promotion.version_control import TrainingRolledBack
from tracegrad_trainer.utils.distributed import RankZeroError, run_on_rank_zero


def all_stop_as_rank_zero_does() -> None:
    """A rollback reaches every rank as itself, an error as rank 0's; collectives go on behind."""
    dist.init_process_group("gloo")
    try:
        assert _raised(TrainingRolledBack("version 1 is served again")) == (
            "TrainingRolledBack",
            "version 1 is served again",
        )
        failed = ("ValueError", "it is full")
        if dist.get_rank():
            failed = (RankZeroError.__name__, "ValueError: it is full")
        assert _raised(ValueError("it is full")) == failed
        assert run_on_rank_zero(dist.get_rank) == 0
    finally:
        dist.destroy_process_group()


def _raised(error: Exception) -> tuple[str, str]:
    def fail() -> NoReturn:
        raise error

    try:
        run_on_rank_zero(fail)
    except Exception as found:
        return type(found).__name__, str(found)
    raise AssertionError("nothing was raised")

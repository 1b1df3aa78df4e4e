"""Checkpoints: model, optimizer and counters, whole or not at all.

A checkpoint is a folder `step-00000012`, written under another name and renamed when every
rank is done. It can be loaded by another number of ranks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .step import Learner

_NAME = re.compile(r"step-(\d{8,})")
_COUNTERS = "counters.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is one line with its path."""


def save_checkpoint(
    learner: Learner, root: Path, step: int, counters: dict[str, Any], *, keep: int
) -> Path:
    """Write checkpoint `step` on all ranks, drop the oldest beyond `keep` -> folder in `root`.

    `counters` is JSON-able and comes back from `load_checkpoint`.

    Raises:
        CheckpointError: on every rank, when any could not write; no partial folder stays.
    """
    folder = root / f"step-{step:08d}"
    partial = root / f".{folder.name}.partial"
    first = dist.get_rank() == 0
    error = _on_first(first, lambda: _fresh(partial))
    if error is None:
        try:
            save(_state(learner), checkpoint_id=partial)
        except CheckpointException as caught:
            error = _cause(caught)
    if error is None:
        own = {"optimizer_steps": learner.steps, "counters": counters}
        error = _on_first(first, lambda: _finish(partial, folder, own))
    if error is not None:
        error = _on_first(first, lambda: _refuse_full_disk(root, learner)) or error
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {folder} not written: {error}")
    if first:
        for old in checkpoints(root)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def load_checkpoint(learner: Learner, folder: Path | str) -> dict[str, Any]:
    """Load into model and optimizer, on all ranks -> the counters it was saved with.

    Raises:
        CheckpointError: it is not there, or of another model.
    """
    folder = Path(folder)
    try:
        own: dict[str, Any] = json.loads((folder / _COUNTERS).read_text())
        state = _state(learner)
        load(state, checkpoint_id=folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} not read: {error}") from error
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {folder} not read: {_cause(error)}") from error
    set_state_dict(
        learner.model,
        learner.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    learner.steps = own["optimizer_steps"]
    counters: dict[str, Any] = own["counters"]
    return counters


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def _state(learner: Learner) -> dict[str, Any]:
    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    return {"model": model, "optimizer": optimizer}


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish(partial: Path, folder: Path, own: dict[str, Any]) -> None:
    (partial / _COUNTERS).write_text(json.dumps(own))
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def _refuse_full_disk(root: Path, learner: Learner) -> None:
    """OSError if a checkpoint has no room: torch says of that only where its writer stood."""
    weights = sum(p.numel() * p.element_size() for p in learner.model.parameters())
    if shutil.disk_usage(root).free < 3 * weights:  # and two moments of each
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))


def _on_first(first: bool, work: Any) -> str | None:
    """Do `work` on rank 0; every rank learns what went wrong, if anything."""
    error: list[str | None] = [None]
    if first:
        try:
            work()
        except OSError as caught:
            error = [str(caught)]
    dist.broadcast_object_list(error, src=0)
    return error[0]


def _cause(error: CheckpointException) -> str:
    causes = {
        str(cause[0] if isinstance(cause, tuple) else cause) for cause in error.failures.values()
    }
    return "; ".join(sorted(causes))

"""The training engine: FSDP2 around a transformers model, one optimizer step, checkpoints.

Settings, and what checkpoints there are, can be had without torch.
"""

from typing import TYPE_CHECKING

from tracegrad_trainer.lazily import lazily

from .settings import CheckpointSettings, FsdpSettings, OptimSettings
from .whole import CheckpointError, checkpoints

if TYPE_CHECKING:
    from .checkpoint import load_checkpoint, save_checkpoint
    from .export import as_in_files, full_tensors, save_hf
    from .ranks import start_ranks, stop_ranks, train_batch
    from .reference import build_reference
    from .result import StepResult
    from .step import Learner
    from .wrap import build_model, pick_device, shard
else:
    __getattr__ = lazily(
        __name__,
        {
            "checkpoint": ("load_checkpoint", "save_checkpoint"),
            "export": ("as_in_files", "full_tensors", "save_hf"),
            "ranks": ("start_ranks", "stop_ranks", "train_batch"),
            "reference": ("build_reference",),
            "result": ("StepResult",),
            "step": ("Learner",),
            "wrap": ("build_model", "pick_device", "shard"),
        },
    )

__all__ = [
    "CheckpointError",
    "CheckpointSettings",
    "FsdpSettings",
    "Learner",
    "OptimSettings",
    "StepResult",
    "as_in_files",
    "build_model",
    "build_reference",
    "checkpoints",
    "full_tensors",
    "load_checkpoint",
    "pick_device",
    "save_checkpoint",
    "save_hf",
    "shard",
    "start_ranks",
    "stop_ranks",
    "train_batch",
]

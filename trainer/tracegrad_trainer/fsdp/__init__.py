"""The training engine: FSDP2 around a transformers model, one optimizer step, checkpoints."""

from .checkpoint import CheckpointError, checkpoints, load_checkpoint, save_checkpoint
from .export import full_tensors, save_hf
from .ranks import start_ranks, stop_ranks, train_batch
from .reference import build_reference
from .settings import CheckpointSettings, FsdpSettings, OptimSettings
from .step import Learner, StepResult
from .wrap import build_model, pick_device, shard

__all__ = [
    "CheckpointError",
    "CheckpointSettings",
    "FsdpSettings",
    "Learner",
    "OptimSettings",
    "StepResult",
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

"""The training engine: FSDP2 around a transformers model, one optimizer step, checkpoints.

Settings, and what checkpoints there are, can be had without torch.
"""

from typing import TYPE_CHECKING

from tracegrad_trainer.engine.checkpoint.manifest import CheckpointError, list_checkpoints
from tracegrad_trainer.engine.config import CheckpointSettings, FsdpSettings, OptimSettings
from tracegrad_trainer.utils.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from tracegrad_trainer.engine.checkpoint.hf_export import as_hf_tensors, full_tensors
    from tracegrad_trainer.engine.checkpoint.save_load import load_checkpoint
    from tracegrad_trainer.engine.distributed import destroy_process_group, init_process_group
    from tracegrad_trainer.engine.model.parallelize import (
        build_model,
        build_sharded,
        shard,
    )
    from tracegrad_trainer.engine.step.learner import Learner
    from tracegrad_trainer.engine.step.train_batch import train_batch
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "checkpoint.save_load": ("load_checkpoint",),
            "checkpoint.hf_export": ("as_hf_tensors", "full_tensors"),
            "distributed": ("destroy_process_group", "init_process_group"),
            "step.train_batch": ("train_batch",),
            "step.learner": ("Learner",),
            "model.parallelize": ("build_model", "build_sharded", "shard"),
        },
    )

__all__ = [
    "CheckpointError",
    "CheckpointSettings",
    "FsdpSettings",
    "Learner",
    "OptimSettings",
    "as_hf_tensors",
    "build_model",
    "build_sharded",
    "destroy_process_group",
    "full_tensors",
    "init_process_group",
    "list_checkpoints",
    "load_checkpoint",
    "shard",
    "train_batch",
]

"""Settings of the training engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FsdpSettings(BaseModel):
    """How the model is laid out over the ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of forward and backward; weights and optimizer stay float32"
    )
    attention: str = Field(
        "packed", description="packed (ours), or a transformers name: sdpa, flash_attention_2, ..."
    )
    gradient_checkpointing: bool = False
    reshard: bool = Field(
        True,
        description="free whole parameters and reduce gradients at every micro-batch; false is"
        " faster while model and gradients fit whole into each rank's memory",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads a rank; default: torch's")
    timeout_s: float = Field(1800.0, gt=0, description="a collective that takes longer has failed")


class OptimSettings(BaseModel):
    """AdamW."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-6, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay_steps: int | None = Field(
        None, ge=1, description="linear decay to the floor at this optimizer step; none: constant"
    )
    lr_floor: float = Field(0.1, ge=0, le=1, description="share of lr at which the decay ends")


class CheckpointSettings(BaseModel):
    """Every step writes a checkpoint; a few stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: int = Field(3, ge=1, description="the newest that stay")

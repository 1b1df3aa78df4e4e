"""Settings of the training engine."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

# torch's ways to compute AdamW, which round differently: one kernel for a whole update, or one for
# each product of many tensors. Steps record which one they took.
AdamwImplementation = Literal["fused", "foreach"]
ADAMW: AdamwImplementation = "fused"


class LoraSettings(BaseModel):
    """Adapters by peft instead of full fine-tuning (LoRA, arXiv 2106.09685)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1, description="inner size of an adapter")
    alpha: int = Field(32, ge=1, description="adapters count for alpha / rank")
    targets: str | tuple[str, ...] = Field(
        "all-linear",
        description="names of the layers that get one, or a regular expression over whole names;"
        " all-linear: all but the head, in mixtures of experts those of the attention",
    )


class FsdpSettings(BaseModel):
    """How the model is laid out over the ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the trainer computes; auto: a GPU where there is one"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of forward and backward; trained weights, optimizer and the sum of gradients"
        " over ranks are float32 in any case; auto: bfloat16 on CUDA, else float32",
    )
    float32_matmul: Literal["highest", "high", "medium"] = Field(
        "highest",
        description="products of float32 matrices, as torch.set_float32_matmul_precision has it:"
        " highest is float32 itself, high is TF32 on GPUs that have it",
    )
    frozen_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="in which weights that are not trained are kept: those beneath adapters, a"
        " reference policy's; auto: bfloat16 on CUDA, else float32",
    )
    attention: Literal[
        "auto", "packed", "varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
    ] = Field(
        "auto",
        description="packed or varlen (ours), or one of transformers; auto: varlen on CUDA in"
        " bfloat16, else packed",
    )
    gradient_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="keep only each block's input and compute the rest again in backward;"
        " selective: keep attention and every second matrix product as well",
    )
    activation_offloading: bool = Field(
        False,
        description="what blocks keep for backward waits in the host's memory; computing waits for"
        " the copies, which are few with gradient_checkpointing = true, and what selective keeps"
        " beside each block's input stays on the device",
    )
    compile: bool = Field(
        False,
        description="torch.compile of each block, but for its attention, which has kernels of its"
        " own: faster steps after a first one that takes minutes",
    )
    cpu_offload: bool = Field(
        False, description="weights, gradients and optimizer stay in the host's memory"
    )
    reshard: bool = Field(
        True,
        description="free whole parameters and reduce gradients at every micro-batch; false is"
        " faster while model and gradients fit whole into each rank's memory",
    )
    replicas: int = Field(
        1,
        ge=1,
        description="copies of the sharded model, each on a share of the ranks (HSDP): with as many"
        " as there are machines weights are gathered within one, only gradients travel between",
    )
    lora: LoraSettings | None = Field(None, description="none: full fine-tuning")
    routing: Literal["own", "r2", "r3"] = Field(
        "own",
        description="experts of a mixture: as the router says now, as it said before the batch"
        " (r2), or as the serving engine chose (r3)",
    )
    experts: Literal["auto", "grouped_mm", "eager"] = Field(
        "auto",
        description="products of a mixture's experts: grouped_mm, all of them at once, or eager,"
        " one expert after the other; auto: grouped_mm where the model and the device have it",
    )
    context_parallel: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="ranks that share the tokens of a micro-batch: for rows too long for one GPU,"
        " and where one long row keeps all others waiting; auto: on GPUs, as many of a machine as"
        " the model's heads allow, in the steps that are quicker by it",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads a rank; default: torch's")
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="a collective that takes longer has failed, as has a start without some rank",
    )

    @property
    def rank_multiple(self) -> int:
        """The number of ranks is a multiple of it."""
        return math.lcm(self.context_ranks, self.replicas)

    @property
    def context_ranks(self) -> int:
        """How many ranks share each micro-batch, whatever its rows."""
        return 1 if self.context_parallel == "auto" else self.context_parallel

    @model_validator(mode="after")
    def _compile_suits(self) -> Self:
        if not self.compile:
            return self
        if self.routing != "own":
            raise ValueError(
                f"fsdp.compile and fsdp.routing = {self.routing!r}: a compiled router cannot be"
                " given its routes; set fsdp.compile = false, or fsdp.routing = 'own'"
            )
        if self.gradient_checkpointing == "selective":
            raise ValueError(
                "fsdp.compile and fsdp.gradient_checkpointing = 'selective': of what is compiled"
                " no single operation can be kept; set gradient_checkpointing to true or false"
            )
        if self.attention not in ("auto", "packed", "varlen"):
            raise ValueError(
                f"fsdp.compile and fsdp.attention = {self.attention!r}: masks of transformers' own"
                " are not compiled for rows of any length; set fsdp.attention = 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _context_parallel_suits(self) -> Self:
        if self.context_ranks == 1:
            return self
        said = f"fsdp.context_parallel = {self.context_parallel}"
        if self.routing != "own":
            raise ValueError(
                f"{said}: the routes of a micro-batch's slice are not replayed yet; set"
                " fsdp.routing = 'own', or fsdp.context_parallel = 1"
            )
        if self.attention not in ("auto", "packed", "varlen"):
            raise ValueError(
                f"{said} needs attention of ours: set fsdp.attention = 'auto', not"
                f" {self.attention!r}"
            )
        return self


class OptimSettings(BaseModel):
    """AdamW."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(
        1e-6,
        ge=0,
        allow_inf_nan=False,
        description="learning rate; full fine-tuning of pretrained models takes about 1e-6 whatever"
        " their size, LoRA about ten times as much",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="decay a step of the first and of the second moment"
    )
    eps: float = Field(
        1e-8,
        gt=0,
        description="added to the root of the second moment: gradients far below it (a parameter's"
        " own, not the norm of all) move a parameter in proportion to their size",
    )
    moments: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="in which both moments are kept between steps: bfloat16 takes 4 bytes a"
        " parameter less; updates are computed in float32 in any case",
    )
    weight_decay: float = Field(0.0, ge=0, description="of matrices; norms and biases never decay")
    max_grad_norm: float = Field(
        1.0, gt=0, description="of all gradients together; inf: never clip"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate behind the warm-up, by optimizer steps"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay_steps: int | None = Field(
        None, ge=1, description="linear, cosine: the optimizer step at which the floor is reached"
    )
    lr_floor: float = Field(0.1, ge=0, le=1, description="share of lr at which the decay ends")
    value_lr: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="of the value head; default: lr"
    )
    value_warmup_steps: int = Field(
        0,
        ge=0,
        description="optimizer steps at the run's start in which the value head alone learns; the"
        " schedule of everything else begins behind them",
    )
    minibatches: int = Field(
        1, ge=1, description="optimizer steps that a pass over a batch is divided into, by rollout"
    )
    epochs: int = Field(1, ge=1, description="passes over a batch")
    scale_by_groups: bool = Field(
        True,
        description="where fewer than batches.groups groups have a turn to train, a step counts for"
        " that share of one: learning rate and moments; false: always a whole step",
    )

    @property
    def moment_bytes(self) -> int:
        """Of both moments of a parameter."""
        return 4 if self.moments == "bfloat16" else 8

    @field_validator("moments", mode="before")
    @classmethod
    def _no_8_bits(cls, value: object) -> object:
        if isinstance(value, str) and "8" in value:
            raise ValueError(
                f"there are no moments in {value}: their scales are of blocks of a rank's own"
                " shard, so that another number of ranks could not load a checkpoint; set"
                " 'bfloat16'"
            )
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas = {self.betas}: each must be at least 0 and below 1")
        if self.schedule == "constant":
            if self.decay_steps is not None:
                raise ValueError(
                    "optim.decay_steps needs a schedule that decays:"
                    " set optim.schedule to 'linear' or 'cosine', or leave it out"
                )
        elif self.decay_steps is None:
            raise ValueError(f"optim.schedule = {self.schedule!r} needs optim.decay_steps")
        elif self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"optim.decay_steps = {self.decay_steps} must be more than"
                f" optim.warmup_steps = {self.warmup_steps}: both count from the first step"
            )
        return self


class CheckpointSettings(BaseModel):
    """How often one is written, while training goes on, and how many stay. Steps are committed, and
    their turns consumed, when a checkpoint has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: int | None = Field(
        None,
        ge=1,
        description="steps from one to the next; default: 1, or no limit where every_s is set",
    )
    every_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a step that ends so long after the last one began to be written gets one",
    )
    idle_s: float = Field(
        60.0,
        ge=0,
        description="where nothing came to train for so long, the steps that no checkpoint has"
        " get one",
    )
    stop_timeout_s: float = Field(
        600.0,
        gt=0,
        description="on Ctrl-C or SIGTERM, for the step under way and the checkpoint of those that"
        " none has yet",
    )
    keep: int = Field(3, ge=1, description="the newest that stay")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints of steps that are multiples of this stay too"
    )
    resume_from: int | None = Field(
        None, ge=1, description="go on from this step's where the last one's is not whole any more"
    )

    @property
    def steps_between(self) -> int | None:
        """After how many steps one is due; None: by time alone."""
        if self.every_steps is None and self.every_s is None:
            return 1
        return self.every_steps

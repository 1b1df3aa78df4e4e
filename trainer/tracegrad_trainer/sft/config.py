"""What `trainer sft` is asked for, besides the trainer's own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from tracegrad.store import RolloutFilter
from tracegrad_trainer.batches import Pairing
from tracegrad_trainer.batches.config import PredicatePath
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.session import RANKS_GRACE_S, check_output_dir

Preset = Literal["sft", "dpo", "kto"]


class SftSettings(BaseModel):
    """One run over stored traces. `which` holds the fields of a `RolloutFilter`.

    Of `trainer` it uses model, reference, state_dir, store, ranks, seed, gpus.train, and the tables
    batches, objective, optim, fsdp, checkpoint and metrics.
    """

    model_config = ConfigDict(extra="forbid")

    trainer: TrainerSettings
    preset: Preset = "sft"
    which: dict[str, Any] = {}
    epochs: int = Field(1, ge=1)
    tokens_per_step: int = Field(
        16_384, ge=2, description="tokens of one optimizer step, context included; at least one"
        " rollout (or pair) in any case"
    )  # fmt: skip
    held_out: float = Field(0.1, ge=0, lt=1, description="share of tasks that is only measured")
    mask_errors: bool = False
    mask: PredicatePath | None = None
    pairs: Pairing = "best_worst"
    pairs_per_task: int = Field(8, ge=1, description='of pairs = "all"')
    decay: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="of the learning rate over the run, where optim has no schedule"
    )
    save_every: int = Field(100, ge=1, description="steps between two checkpoints")
    out: Path | None = None

    @field_validator("out")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.resolve()

    @model_validator(mode="after")
    def _out_is_free(self) -> Self:
        if self.out is not None:
            check_output_dir(self.out, (self.trainer.model, self.trainer.reference_folder))
        return self

    @model_validator(mode="after")
    def _trainer_settings_fit(self) -> Self:
        trainer = self.trainer
        if trainer.objective.preset != self.preset:
            raise ValueError(
                f"objective.preset is {trainer.objective.preset!r}, and --preset {self.preset}:"
                " leave objective.preset out"
            )
        for name in ("minibatches", "epochs"):
            if getattr(trainer.optim, name) != 1:
                raise ValueError(
                    f"optim.{name} divides batches of rollouts: of trainer sft set"
                    " --tokens-per-step and --epochs"
                )
        if trainer.objective.kl != "none":
            raise ValueError(
                "objective.kl is of tokens that the policy sampled, and trainer sft imitates stored"
                " ones: set it to 'none'"
            )
        if trainer.fsdp.routing == "r3":
            raise ValueError(
                "fsdp.routing = 'r3' replays what the engine chose for the policy's own tokens: of"
                " trainer sft set it to 'own'"
            )
        return self

    @property
    def rollout_filter(self) -> RolloutFilter:
        return RolloutFilter(**self.which)

    @property
    def compares_rollouts(self) -> bool:
        """Whether rollouts are compared with each other by their rewards."""
        return self.preset != "sft"

    @property
    def run_folder(self) -> Path:
        return self.trainer.state_dir / "sft"

    @property
    def progress_file(self) -> Path:
        """The run's progress records, for the command that waits for it."""
        return self.trainer.state_dir / "run" / "sft.jsonl"

    def fingerprint(self) -> dict[str, Any]:
        """All of it that decides the weights: runs of equal data and settings are one run."""
        trainer = self.trainer.model_dump(mode="json", include={"model", "reference", "seed"})
        for name in ("objective", "optim", "batches"):
            trainer[name] = getattr(self.trainer, name).model_dump(mode="json")
        trainer["optim"].pop("scale_by_groups")  # of batches of groups: it decides nothing here
        # Not at the top: the command that only checks its settings needs no torch.
        from tracegrad_trainer.engine.distributed import resolved_dtypes

        fsdp = self.trainer.fsdp
        trainer["fsdp"] = {
            "compute_dtype": resolved_dtypes(fsdp)["compute_dtype"],
            **fsdp.model_dump(mode="json", include={"lora"}),
        }
        own = {"preset", "epochs", "tokens_per_step", "held_out", "decay"}
        return trainer | self.model_dump(mode="json", include=own)


# Of a settings file these are another command's; named for this one they are a mistake.
_UNUSED_TABLES = ("data", "guards", "promotion", "push", "resample", "rewards", "vllm")
_UNUSED = {
    "max_steps": "set --epochs",
    "batches.drop_equal_reward": "there are no groups; leave it out",
    **dict.fromkeys(
        ("batches.max_staleness", "batches.stale", "batches.stale_decay"),
        "stored traces are learnt whatever their version; leave it out",
    ),
    "batches.groups": "there are no groups; set --tokens-per-step",
    "batches.group_size": "there are no groups; set --tokens-per-step",
    "optim.scale_by_groups": "there are no groups; leave it out",
    "checkpoint.every_steps": "set --save-every",
    "checkpoint.every_s": "set --save-every",
    "checkpoint.idle_s": "nothing is waited for; leave it out",
    "checkpoint.stop_timeout_s": f"a stopped run has {RANKS_GRACE_S:.0f} s; leave it out",
    "checkpoint.keep_every": "set --save-every, and checkpoint.keep: so many stay",
    "checkpoint.resume_from": "the same command goes on from its last checkpoint; leave it out",
}
# All that is used of these tables.
_USED_OF = {"gpus": "gpus.train", "proxy": "proxy.store"}


def check_settings_used(sets: Sequence[str]) -> None:
    """`sets`: name=value, as they were given. Raises ValueError: `trainer sft` does not use one."""
    for given in sets:
        name = given.partition("=")[0].strip()
        table = name.partition(".")[0]
        if name in _USED_OF:
            raise ValueError(f"{name}: trainer sft uses {_USED_OF[name]} of it alone; set that")
        if table in _UNUSED_TABLES or _USED_OF.get(table, name) != name:
            raise ValueError(f"{name}: trainer sft does not use it; leave it out")
        if name in _UNUSED:
            raise ValueError(f"{name}: trainer sft does not use it: {_UNUSED[name]}")


def load_sft_settings(trainer: TrainerSettings, which: RolloutFilter, **asked: Any) -> SftSettings:
    """Raises ValueError: one line that names what is wrong."""
    given: Mapping[str, Any] = asdict(which)
    fields = {name: value for name, value in given.items() if value not in (None, {})}
    try:
        # Not validated again: that would read the environment over the command line.
        return SftSettings(trainer=trainer, which=fields, **asked)
    except ValidationError as error:
        raise ValueError("; ".join(_line(one) for one in error.errors())) from None


def _line(error: Any) -> str:
    name = "--" + str(error["loc"][0]).replace("_", "-") if error["loc"] else ""
    return ": ".join(filter(None, (name, error["msg"].removeprefix("Value error, "))))

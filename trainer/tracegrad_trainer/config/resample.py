"""Settings of resampling."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.config.data import DataSettings

# Rollouts that are made here carry it, so that training, scorers and people tell them apart; the
# second one has the id of the rollout whose prompt it was.
RESAMPLED, RESAMPLE_OF = "resampled", "resample_of"


class ResampleSettings(BaseModel):
    """First prompts of live rollouts, sampled again as groups that training can compare."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Literal["none", "live"] = Field(
        "none",
        description="live: the first prompt of a rollout that nobody groups is sampled again by the"
        " served model, batches.group_size times (and data.over_sample more), and those rollouts"
        " are trained; of calls without tools alone, which need no world",
    )
    tags: dict[str, str] = Field(
        {}, description="only prompts of rollouts that carry all of these tags"
    )
    max_age_s: float = Field(
        3600,
        gt=0,
        allow_inf_nan=False,
        description="older prompts are not sampled again; of the others the newest come first",
    )
    concurrency: int = Field(2, ge=1, description="prompts that are sampled again at a time")

    @field_validator("tags")
    @classmethod
    def _are_live_ones(cls, tags: dict[str, str]) -> dict[str, str]:
        for key in (RESAMPLED, RESAMPLE_OF):
            if key in tags:
                raise ValueError(
                    f"{key!r} is what rollouts carry that were sampled again, and those are not"
                    " once more: leave it out"
                )
        return tags


def check_resampling(data: DataSettings, batches: BatchSettings, *, judged: bool) -> None:
    """Whether what is sampled again is trained, and alone. `judged`: somebody rewards rollouts that
    nobody sees. Raises ValueError."""
    if data.tags.get(RESAMPLED) != "true":
        raise ValueError(
            "resample.prompts: live rollouts have no group, and would be leased beside those that"
            f' have; set data.tags = {{{RESAMPLED} = "true"}}'
        )
    if not judged:
        raise ValueError(
            "resample.prompts: people see the live reply, and nobody rewards those that are sampled"
            " again: set rewards.judge, rewards.functions or rewards.commands"
        )
    if batches.span_paths:
        raise ValueError(
            "batches.span_paths: prompts that are sampled again (resample.prompts = 'live') lie in"
            " no span, so that span paths do not tell them apart: leave it out, and name agents in"
            " batches.agents"
        )
    if not (batches.stale == "wait" or data.synchronous or data.in_flight is not None):
        raise ValueError(
            "resample.prompts: nothing bounds how many rollouts are opened: set data.in_flight, or"
            " batches.stale = 'wait'"
        )

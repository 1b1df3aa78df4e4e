"""Which rollouts are trained on, and how many may be under way."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataSettings(BaseModel):
    """Which rollouts are trained on, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tags: dict[str, str] = Field({}, description="only rollouts that carry all of these tags")
    incomplete_after_s: float = Field(
        120, gt=0, description="a group that nobody completes is taken smaller after this time"
    )
    idle_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a rollout that nobody opened ends as completed after this time without a call;"
        " a later call opens it again, or goes on in another rollout once it is leased; left out:"
        " such rollouts never end, and are not trained",
    )
    lease_ttl_s: float = Field(
        1800,
        gt=0,
        description="groups of a trainer that died are free for others after this time;"
        " one that lives renews them",
    )
    in_flight: int | None = Field(
        None,
        ge=1,
        description="most rollouts that are open, or wait to be trained, at once: drivers that ask"
        " wait for a place (AReaL's max_concurrent_rollouts, prime-rl's max_inflight_rollouts);"
        " left out: any number",
    )
    over_sample: int = Field(
        0,
        ge=0,
        description="so many more attempts are asked for at each task than batches.group_size; the"
        " group is cut to that by over_sample_keep, and the others are kept and skipped as"
        " over_sampled",
    )
    over_sample_keep: Literal["first", "drawn"] = Field(
        "first",
        description="first: the attempts that finish first, which prefers short ones, and waits for"
        " no slow one; drawn: by lot, when all have finished, which prefers none",
    )
    synchronous: bool = Field(
        False,
        description="rollouts of the next batch are opened only when the weights of this one are"
        " served, so that every batch is on-policy (AReaL's max_head_offpolicyness = 0)",
    )
    silent_s: float = Field(
        600,
        gt=0,
        allow_inf_nan=False,
        description="a rollout without a call, or without its reward, for so long takes no place of"
        " in_flight, max_staleness or synchronous any more: who opened it may be gone",
    )
    refill: bool | None = Field(
        None,
        description="replace groups of equal rewards within the same batch; default: preset dapo's",
    )

    @model_validator(mode="after")
    def _keep_is_used(self) -> DataSettings:
        if self.over_sample_keep == "drawn" and not self.over_sample:
            raise ValueError(
                "over_sample_keep = 'drawn': there are no more attempts to draw from; set"
                " over_sample, or leave it out"
            )
        return self

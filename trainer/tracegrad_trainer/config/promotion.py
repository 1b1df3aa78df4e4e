"""Which versions are served, promoted and kept."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tracegrad.events import MAX_REWARD


class PromotionSettings(BaseModel):
    """Which versions are served, promoted and kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: int = Field(
        3,
        ge=0,
        description="versions whose weights stay on disk to be returned to, with their checkpoints;"
        " pinned ones, the promoted one and the one that is served stay besides; 0: only those",
    )
    gate: Literal["none", "held_out"] = Field(
        "none",
        description="held_out: a version is a candidate until its held-out rollouts are compared"
        " with those of the promoted version; training waits meanwhile; none: each pushed version"
        " is served",
    )
    tags: dict[str, str] = Field(
        {"split": "held_out"},
        description="with gate held_out: rollouts that carry all of these tags are held out; they"
        " are compared, and never trained",
    )
    alpha: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="with gate held_out: the most that each verdict, improved or regressed, is"
        " wrong with, however often it is looked at",
    )
    max_rollouts: int = Field(
        200,
        ge=2,
        description="with gate held_out: rollouts of a version after which a verdict is"
        " inconclusive for good, and that are gathered of a promoted one to compare with",
    )
    inconclusive: Literal["keep", "promote"] = Field(
        "keep",
        description="with gate held_out: of a version without a verdict after max_rollouts: keep"
        " the promoted one, and train on, or promote it",
    )
    regressed: Literal["continue", "pause"] = Field(
        "continue",
        description="with gate held_out: after the rollback of a version that regressed, training"
        " goes on from the promoted one, or is paused",
    )
    reward_low: float = Field(
        0,
        ge=-MAX_REWARD,
        description="with gate held_out: least reward; one below it counts as it",
    )
    reward_high: float = Field(
        1,
        le=MAX_REWARD,
        description="with gate held_out: largest reward; one above it counts as it",
    )

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> Self:
        if not self.reward_low < self.reward_high:
            raise ValueError(
                f"reward_low is {self.reward_low:g}, which is not below reward_high"
                f" ({self.reward_high:g})"
            )
        return self

    @model_validator(mode="after")
    def _gate_has_tags(self) -> Self:
        if self.gate == "held_out" and not self.tags:
            raise ValueError("tags are empty: every rollout would be held out, and none trained")
        return self

    @property
    def held_out(self) -> dict[str, str] | None:
        """The tags of rollouts that are never trained; None: all may be."""
        return self.tags if self.gate == "held_out" else None

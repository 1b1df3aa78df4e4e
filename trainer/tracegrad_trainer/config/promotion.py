"""Which versions are served, promoted and kept."""

from __future__ import annotations

from pathlib import Path
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
    gate: Literal["none", "held_out", "canary"] = Field(
        "none",
        description="held_out: a version is a candidate until its held-out rollouts are compared"
        " with those of the promoted version; canary: until the rollouts of its share of traffic"
        " are, which one of several engines serves, or the one engine as a second LoRA adapter;"
        " training waits meanwhile; none: each pushed version is served",
    )
    canary_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="with gate canary: share of rollouts that the candidate is given, each of them"
        " from its first call to its last",
    )
    tags: dict[str, str] = Field(
        {"split": "held_out"},
        description="with gate held_out: rollouts that carry all of these tags are held out, as"
        " those are that were opened so (held_out=True); they are compared, and never trained",
    )
    tasks: Path | None = Field(
        None,
        description="with gate held_out: a file of tasks, or a folder of Harbor's, that"
        " `tracegrad run --eval` runs against each version as long as the gate wants held-out"
        " rollouts of it; left out: others make them",
    )
    command: tuple[str, ...] = Field(
        (),
        description="with tasks: the agent's command, as a list of words with {prompt} or {task_id}"
        " in them, of tasks that name none",
    )
    agent: str | None = Field(
        None, description="with tasks: the agent whose recipe is run (`tracegrad agents`)"
    )
    alpha: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="with a gate: the most that each verdict, improved or regressed, is"
        " wrong with, however often it is looked at",
    )
    max_rollouts: int = Field(
        200,
        ge=2,
        description="with a gate: rollouts of a version, with a reward, after which a verdict is"
        " inconclusive for good, and that are gathered of a promoted one to compare with; those"
        " that get none are replaced, until there are twice as many of both",
    )
    inconclusive: Literal["keep", "promote"] = Field(
        "keep",
        description="with a gate: of a version without a verdict after max_rollouts: keep"
        " the promoted one, and train on, or promote it",
    )
    regressed: Literal["continue", "pause"] = Field(
        "continue",
        description="with a gate: after the rollback of a version that regressed, training"
        " goes on from the promoted one, or is paused",
    )
    reward_low: float = Field(
        0,
        ge=-MAX_REWARD,
        description="with a gate: least reward; one below it counts as it",
    )
    reward_high: float = Field(
        1,
        le=MAX_REWARD,
        description="with a gate: largest reward; one above it counts as it",
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

    @model_validator(mode="after")
    def _tasks_are_run(self) -> Self:
        if self.tasks is not None and self.gate != "held_out":
            raise ValueError(
                "tasks: nobody waits for their rollouts: set promotion.gate = 'held_out', or leave"
                " them out"
            )
        for name in ("command", "agent"):
            if getattr(self, name) and self.tasks is None:
                raise ValueError(
                    f"{name}: there are no tasks: set promotion.tasks, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _share_is_used(self) -> Self:
        unused = PromotionSettings.model_fields["canary_share"].default
        if self.gate != "canary" and self.canary_share != unused:
            raise ValueError(
                "canary_share: there is no canary: set promotion.gate = 'canary', or leave it out"
            )
        return self

    @property
    def held_out(self) -> dict[str, str] | None:
        """The tags of rollouts that are never trained; None: all may be."""
        return self.tags if self.gate == "held_out" else None

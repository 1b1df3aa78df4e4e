"""Settings of batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tracegrad.import_path import import_part


def _importable(path: str) -> str:
    import_part("predicate", path)
    return path


def _not_empty(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if not pattern.removeprefix("!"):
            raise ValueError(f"pattern {pattern!r} is empty; write a name such as writer, or *")
    return patterns


Patterns = Annotated[tuple[str, ...], AfterValidator(_not_empty)]
PredicatePath = Annotated[str, AfterValidator(_importable)]
ScoredOutcome = Literal["completed", "agent_error", "budget"]


class BatchSettings(BaseModel):
    """How finished groups become packed micro-batches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: int = Field(16, ge=1, description="groups (tasks) of one batch")
    group_size: int = Field(
        8, ge=1, description="rollouts of one group; 1: every rollout by itself, task or not"
    )
    tokens_per_micro_batch: int = Field(4096, ge=2, description="token budget of one forward")
    max_row_tokens: int | None = Field(
        None, ge=2, description="longest row; default: the token budget"
    )
    over_long: Literal["cut", "drop"] = Field(
        "cut",
        description="a path that is longer than a row: cut behind the last turn that fits, or"
        " drop it whole",
    )
    shared_prefix: Literal["paths", "tree"] = Field(
        "paths",
        description="a rollout that forks: one row a path, or one row whose branches share what"
        " they begin with (needs tree attention)",
    )
    max_staleness: int | None = Field(
        4, ge=0, description="policy versions a turn may lag behind; none: no limit"
    )
    stale: Literal["drop", "wait", "weight"] = Field(
        "drop",
        description="what max_staleness does. Turns that lag further are never trained; drop: that"
        " is all. wait: drivers are told to wait before that many batches are under way, as AReaL"
        " does (docs/training.md, Asynchrony). weight: turns within it have their advantage times"
        " stale_decay ** lag",
    )
    stale_decay: float = Field(0.8, gt=0, le=1, description="stale = weight: a version of lag")
    drop_equal_reward: bool = Field(
        True,
        description="skip groups of several rollouts whose rewards do not differ; the trainer's"
        " default: where the advantage compares",
    )
    drop_repeated: bool = Field(
        False, description="skip turns that repeat an earlier prompt and reply of their rollout"
    )
    drop_truncated: bool = Field(
        False,
        description="skip turns whose reply was cut off at its token limit (finish_reason length,"
        " or tool_calls of a reply as long as the limit)",
    )
    negative_max_tokens: int | None = Field(
        None,
        ge=1,
        description="rollouts that sampled more tokens and whose advantage is not above 0: not"
        " trained",
    )
    negative_max_turns: int | None = Field(
        None, ge=1, description="the same, by the number of sampled turns"
    )
    outcomes: tuple[ScoredOutcome, ...] = Field(
        ("completed", "agent_error", "budget"),
        min_length=1,
        description="outcomes that are trained; the others still count in their group's baseline",
    )
    agents: Patterns = Field(
        (),
        description="of several agents in a rollout those whose turns are trained, by name:"
        " patterns with * and ?, with ! in front those that are not; empty: all",
    )
    models: Patterns = Field(
        (),
        description="the same by the model's name: either the one that the agent asked for, or the"
        " one that the engine answered with (a candidate's, with -candidate behind it, is the"
        " policy's too)",
    )
    span_paths: Patterns = Field(
        (),
        description="the same by the spans that a call lies in: names from the outermost one on,"
        " with / between, such as */writer",
    )
    predicate: PredicatePath | None = Field(
        None,
        description="package.module:function(turn, rollout) -> whether to train the turn, or the"
        " reason why not",
    )

    @property
    def needs_scopes(self) -> bool:
        """Whether it matters which agent made a call, and in which spans."""
        return bool(self.agents or self.span_paths)

    @property
    def row_limit(self) -> int:
        """Longest row in tokens."""
        return self.max_row_tokens or self.tokens_per_micro_batch

    @model_validator(mode="after")
    def _decay_is_used(self) -> BatchSettings:
        usual = type(self).model_fields["stale_decay"].default
        if self.stale != "weight" and self.stale_decay != usual:
            raise ValueError(
                f"stale_decay {self.stale_decay:g}: it is of stale = 'weight', set that or leave it"
                " out"
            )
        return self

    @model_validator(mode="after")
    def _waits_for_a_bound(self) -> BatchSettings:
        if self.stale == "wait" and self.max_staleness is None:
            raise ValueError(
                "stale = 'wait' waits by max_staleness, and that is none: give a number of"
                " versions, or set stale = 'drop'"
            )
        return self

    @model_validator(mode="after")
    def _rows_fit(self) -> BatchSettings:
        if self.row_limit > self.tokens_per_micro_batch:
            raise ValueError(
                f"max_row_tokens ({self.max_row_tokens}) exceeds tokens_per_micro_batch"
                f" ({self.tokens_per_micro_batch}): a row is never split, so raise the budget"
            )
        return self

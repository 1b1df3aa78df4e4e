"""Settings of drift guards."""

from __future__ import annotations

import re
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

Signal = Literal[
    "invalid_tool_calls",
    "no_ops",
    "questions",
    "refusals",
    "long_replies",
    "short_replies",
    "unsolved",
]
SIGNALS: tuple[Signal, ...] = get_args(Signal)

_REFUSALS = (
    r"^\W*(?:i'?m |i am )?(?:very )?sorry\b",
    r"\bi(?:'m| am) (?:unable|not able|not allowed) to\b",
    r"\bi (?:can'?t|can ?not|won'?t|will not|must decline to)\b",
    r"\bas an ai\b",
)


class GuardSettings(BaseModel):
    """Which drifts are looked for before a batch is trained, and what is done about one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["off", "warn", "pause", "rollback"] = Field(
        "warn",
        description="when a guard raises an alarm: a line in the log; or training is paused until"
        " `trainer resume`; or the last version before the drift is served again, too",
    )
    watch: tuple[Signal, ...] = Field(
        SIGNALS, description="shares that must not rise, of rollouts (unsolved: of groups)"
    )
    baseline: int = Field(
        128,
        ge=16,
        description="groups first seen, that later ones are compared with; a rollout that nobody"
        " grouped is a group of one",
    )
    margin: float = Field(
        0.15, gt=0, lt=1, description="a share may rise by so much above the baseline's"
    )
    false_alarm_every: float = Field(
        1e6,
        gt=100,
        allow_inf_nan=False,
        description="while nothing drifts by more than the margin, a guard raises an alarm once in"
        " so many groups on average, or less often",
    )
    refusals: tuple[str, ...] = Field(
        _REFUSALS, description="regular expressions, without case, of a reply that refuses"
    )
    solved_from: float = Field(
        0.5, allow_inf_nan=False, description="reward from which an attempt has solved its task"
    )
    min_entropy: float | None = Field(
        None, gt=0, description="alarm when a step's tokens have less entropy, nats, on average"
    )
    max_kl: float | None = Field(
        None, gt=0, description="alarm when a step's KL to the reference is more, nats a token"
    )

    @field_validator("refusals")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

"""Settings of the batches room."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class BatchSettings(BaseModel):
    """How finished groups become packed micro-batches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: int = Field(16, ge=1, description="groups (tasks) of one batch")
    group_size: int = Field(8, ge=2, description="rollouts of one group")
    tokens_per_micro_batch: int = Field(4096, ge=2, description="token budget of one forward")
    max_row_tokens: int | None = Field(
        None, ge=2, description="turns that end later are skipped; default: the token budget"
    )
    max_staleness: int | None = Field(
        4, ge=0, description="policy versions a turn may lag behind; none: no limit"
    )
    drop_equal_reward: bool = Field(True, description="skip groups that carry no signal")

    @property
    def row_limit(self) -> int:
        """Longest row in tokens."""
        return self.max_row_tokens or self.tokens_per_micro_batch

    @model_validator(mode="after")
    def _rows_fit(self) -> BatchSettings:
        if self.row_limit > self.tokens_per_micro_batch:
            raise ValueError(
                f"max_row_tokens ({self.max_row_tokens}) exceeds tokens_per_micro_batch"
                f" ({self.tokens_per_micro_batch}): a row is never split, so raise the budget"
            )
        return self

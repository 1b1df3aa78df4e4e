"""A finished rollout as scorers get it: what was asked, said and called, without token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracegrad.events import UNACKNOWLEDGED, Json
from tracegrad.inspect.transcript import Transcript, as_text
from tracegrad.proxy.dialects.history import recorded_reply
from tracegrad.store import RolloutDetail
from tracegrad_trainer.rewards.compose import latest_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurn:
    """An LLM call. `messages` are all that it was made with, in the form of Chat Completions,
    whatever dialect the client speaks; `reply` is the answer's, None where none was recorded.
    `tools` are the names of those that the model was offered. Texts that were not kept are not
    here."""

    turn_id: str
    messages: Sequence[Json]
    reply: Json | None
    tools: Sequence[str]
    model: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    created_at: float  # seconds since the epoch

    @property
    def text(self) -> str:
        """Of the reply; "" where it has none."""
        return as_text((self.reply or {}).get("content"))

    @property
    def tool_calls(self) -> Sequence[Json]:
        """Of the reply: `{"id": ..., "function": {"name": ..., "arguments": ...}}`."""
        calls = (self.reply or {}).get("tool_calls")
        return calls if isinstance(calls, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """`rewards`: what is known of its parts, by name; `task`: what was asked, as the agent gave
    it. Turns are in order of capture."""

    rollout_id: str
    task_id: str | None
    task: Any
    agent: str | None
    tags: Mapping[str, str]
    outcome: str
    error: str | None
    opened_at: float
    finished_at: float | None
    rewards: Mapping[str, float]
    turns: Sequence[ScoredTurn]

    @property
    def replies(self) -> list[str]:
        """The texts of its replies."""
        return [turn.text for turn in self.turns]

    @property
    def last_reply(self) -> str:
        """Of the last turn that has one; "" where none has."""
        return next((turn.text for turn in reversed(self.turns) if turn.reply is not None), "")

    def as_json(self) -> Json:
        return asdict(self)


def scored_rollout(detail: RolloutDetail) -> ScoredRollout:
    """Of a rollout that ended. Calls whose clients were refused, and made again, are left out."""
    row = detail.summary
    transcript = Transcript(detail.turns)
    turns = [
        ScoredTurn(
            turn_id=turn.turn_id,
            messages=transcript.all_messages(index),
            reply=recorded_reply(turn),
            tools=transcript.tools(index),
            model=turn.model,
            finish_reason=turn.finish_reason,
            prompt_tokens=len(turn.prompt_token_ids),
            completion_tokens=len(turn.completion_token_ids),
            created_at=turn.created_at,
        )
        for index, turn in enumerate(detail.turns)
        if turn.untrainable != UNACKNOWLEDGED
    ]
    return ScoredRollout(
        rollout_id=row.rollout_id,
        task_id=row.task_id,
        task=detail.task,
        agent=row.agent,
        tags=row.tags,
        outcome=str(row.outcome),
        error=row.error,
        opened_at=row.opened_at,
        finished_at=row.finished_at,
        rewards=latest_parts(detail.rewards),
        turns=turns,
    )

"""What scorers get of a rollout, read from the store."""

from __future__ import annotations

from tracegrad.events import UNACKNOWLEDGED
from tracegrad.inspect.transcript import Transcript
from tracegrad.proxy.dialects.history import recorded_reply
from tracegrad.store import RolloutDetail
from tracegrad_trainer.rewards.compose import latest_parts
from tracegrad_trainer.rewards.rollout import ScoredRollout, ScoredTurn


def read_rollout(detail: RolloutDetail) -> ScoredRollout:
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

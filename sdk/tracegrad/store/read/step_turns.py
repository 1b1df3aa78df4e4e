"""The turns of a rollout as a step left them: what became of each, a page at a time."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, select

from tracegrad.store.models import TurnLedger, Turns


class TurnKey(NamedTuple):
    """The turn that a page begins behind: its row, and its number in the rollout."""

    seq: int
    number: int


class StepTurn(NamedTuple):
    """`step` and `skip_reason` None: nothing was decided about it. `advantage` None: it is not
    known, or the turn was not trained."""

    key: TurnKey
    turn_id: str
    prompt_tokens: int
    sampled_tokens: int
    step: int | None
    skip_reason: str | None
    advantage: float | None


BEFORE_FIRST = TurnKey(-1, -1)


def turns_of_step(
    connection: Connection, rollout_id: str, after: TurnKey = BEFORE_FIRST, *, limit: int
) -> list[StepTurn]:
    """At most `limit` turns of a rollout that some step consumed, in order of capture."""
    query = (
        select(
            Turns.seq,
            Turns.turn_id,
            Turns.prompt_tokens,
            Turns.completion_tokens,
            TurnLedger.step,
            TurnLedger.skip_reason,
            TurnLedger.advantage,
        )
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .where(Turns.rollout_id == rollout_id, Turns.seq > after.seq)
        .order_by(Turns.seq)
        .limit(limit)
    )
    return [
        StepTurn(
            key=TurnKey(row.seq, number),
            turn_id=row.turn_id,
            prompt_tokens=row.prompt_tokens,
            sampled_tokens=row.completion_tokens,
            step=row.step,
            skip_reason=row.skip_reason,
            advantage=row.advantage,
        )
        for number, row in enumerate(connection.execute(query), after.number + 1)
    ]

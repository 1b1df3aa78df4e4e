"""Facts into rows, inside the caller's transaction. Writing a fact again changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, false, select, true, update

from tracegrad.records import (
    OVER_LENGTH,
    Fact,
    Outcome,
    RewardGiven,
    RolloutFinished,
    RolloutOpened,
    SpanEnded,
    Turn,
)
from tracegrad.store.databases import insert_new
from tracegrad.store.errors import FactRefused
from tracegrad.store.schema import Outcomes, Rewards, Rollouts, RolloutTags, Spans, Turns
from tracegrad.store.sql import chunks

Values = dict[str, Any]


class TurnKnown(Exception):
    """A turn that was to be new is stored already."""


@dataclass
class Batch:
    """Facts by kind, in order; of turns with the same id the first."""

    first_seen: dict[str, float] = field(default_factory=dict)
    opened: list[RolloutOpened] = field(default_factory=list)
    finished: list[RolloutFinished] = field(default_factory=list)
    rewards: list[RewardGiven] = field(default_factory=list)
    spans: list[SpanEnded] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)

    def saw(self, rollout_id: str, at: float) -> None:
        if not rollout_id:
            raise FactRefused("rollout_id: it is empty")
        self.first_seen[rollout_id] = min(at, self.first_seen.get(rollout_id, at))


def sort_facts(facts: Iterable[Fact]) -> Batch:
    """Raises `FactRefused` for a fact without a rollout's name."""
    batch = Batch()
    for fact in facts:
        match fact:
            case RolloutOpened():
                batch.saw(fact.rollout_id, fact.opened_at)
                batch.opened.append(fact)
            case RolloutFinished():
                batch.saw(fact.rollout_id, fact.finished_at)
                batch.finished.append(fact)
            case RewardGiven():
                batch.saw(fact.rollout_id, fact.created_at)
                batch.rewards.append(fact)
            case SpanEnded():
                if fact.rollout_id is not None:
                    batch.saw(fact.rollout_id, fact.start_ns / 1e9)
                batch.spans.append(fact)
            case Turn():
                batch.saw(fact.rollout_id, fact.created_at)
                batch.turns.setdefault(fact.turn_id, fact)
    return batch


def write_batch(
    connection: Connection,
    batch: Batch,
    turn_rows: Sequence[Values],
    new_rollouts: Iterable[str],
) -> None:
    """`turn_rows` are those of the batch's turns that are new (`turn_rows.turn_rows`),
    `new_rollouts` those of its rollouts that may be.

    Raises `TurnKnown` if one of them is not, `FactRefused` for a fact that contradicts itself.
    """
    _insert(
        connection,
        Rollouts,
        [
            {"rollout_id": name, "opened": False, "opened_at": batch.first_seen[name]}
            for name in new_rollouts
        ],
    )
    _open(connection, batch.opened)
    if _insert(connection, Turns, turn_rows) != len(turn_rows):
        raise TurnKnown
    _finish(connection, batch.finished)
    _insert(connection, Rewards, [_reward_row(reward) for reward in batch.rewards])
    _insert(connection, Spans, [_span_row(span) for span in batch.spans])


def _insert(connection: Connection, table: Any, rows: Sequence[Values]) -> int:
    """How many were new."""
    if not rows:
        return 0
    # Of inserts SQLAlchemy forgets the count, unless it is told that somebody wants it.
    wanted = {"preserve_rowcount": True}
    return connection.execute(
        insert_new(connection, table), rows, execution_options=wanted
    ).rowcount


def _open(connection: Connection, facts: Sequence[RolloutOpened]) -> None:
    if not facts:
        return
    # Of several openings of one rollout the first counts, here and in the table.
    first = {fact.rollout_id: fact for fact in reversed(facts)}
    bare: set[str] = set()
    for ids in chunks(list(first)):
        query = select(Rollouts.rollout_id).where(
            Rollouts.rollout_id.in_(ids), Rollouts.opened == false()
        )
        bare.update(connection.scalars(query))
    new = [fact for fact in first.values() if fact.rollout_id in bare]
    if not new:
        return
    connection.execute(
        update(Rollouts).where(Rollouts.rollout_id == bindparam("which")).values(opened=true()),
        [
            {
                "which": fact.rollout_id,
                "opened_at": fact.opened_at,
                "task_id": fact.task_id,
                "agent": fact.agent,
                "task": fact.task,
            }
            for fact in new
        ],
    )
    _insert(
        connection,
        RolloutTags,
        [
            {"rollout_id": fact.rollout_id, "key": key, "value": str(value), "position": position}
            for fact in new
            for position, (key, value) in enumerate(fact.tags.items())
        ],
    )


def _finish(connection: Connection, facts: Sequence[RolloutFinished]) -> None:
    """Of several ends of one rollout the first counts.

    An agent that crashed right after its context was full has used up its budget. Its last turn
    is stored before its end: it crashed on the refusal, which it gets after the commit.
    """
    if not facts:
        return
    _insert(
        connection,
        Outcomes,
        [
            {
                "rollout_id": fact.rollout_id,
                "outcome": Outcome(fact.outcome).value,
                "error": fact.error,
                "finished_at": fact.finished_at,
            }
            for fact in facts
        ],
    )
    crashed = [f.rollout_id for f in facts if f.outcome == Outcome.AGENT_ERROR]
    full = _over_length(connection, crashed)
    connection.execute(
        update(Rollouts).where(
            Rollouts.rollout_id == bindparam("which"), Rollouts.finished_at.is_(None)
        ),
        [
            {
                "which": fact.rollout_id,
                "outcome": (
                    Outcome.BUDGET
                    if fact.outcome == Outcome.AGENT_ERROR and fact.rollout_id in full
                    else Outcome(fact.outcome)
                ).value,
                "error": fact.error,
                "finished_at": fact.finished_at,
            }
            for fact in facts
        ],
    )


def _over_length(connection: Connection, rollout_ids: Sequence[str]) -> set[str]:
    """Those whose last turn was refused because its prompt is over the engine's context."""
    full = set()
    for rollout_id in rollout_ids:
        last = (
            select(Turns.untrainable)
            .where(Turns.rollout_id == rollout_id)
            .order_by(Turns.seq.desc())
            .limit(1)
        )
        if connection.scalar(last) == OVER_LENGTH:
            full.add(rollout_id)
    return full


def _reward_row(fact: RewardGiven) -> Values:
    if not math.isfinite(fact.value):
        raise FactRefused(
            f"value: reward {fact.name!r} of rollout {fact.rollout_id} is {fact.value}; "
            "give a finite number"
        )
    return {
        "reward_id": fact.reward_id,
        "rollout_id": fact.rollout_id,
        "value": float(fact.value),
        "name": fact.name,
        "turn": fact.turn,
        "source": fact.source,
        "created_at": fact.created_at,
    }


def _span_row(fact: SpanEnded) -> Values:
    return {
        "trace_id": fact.trace_id,
        "span_id": fact.span_id,
        "parent_span_id": fact.parent_span_id,
        "rollout_id": fact.rollout_id,
        "name": fact.name,
        "kind": fact.kind,
        "start_ns": fact.start_ns,
        "end_ns": fact.end_ns,
        "status": fact.status,
        "attributes": fact.attributes,
    }

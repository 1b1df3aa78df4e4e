"""Of stored rollouts: which agent made each call, and in which spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from tracegrad.protocol import TURN_ATTRIBUTE
from tracegrad.store.models import Rollouts, Spans, TurnLedger, Turns
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.types import AgentTurns
from tracegrad.turn_scopes import AGENT_ATTRIBUTES, TurnScope, turn_scopes

_ATTRIBUTES = (*AGENT_ATTRIBUTES, TURN_ATTRIBUTE)


@dataclass(frozen=True, slots=True)
class _Span:
    span_id: str
    parent_span_id: str | None
    name: str
    attributes: Mapping[str, Any]


def load_turn_scopes(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, TurnScope]:
    """By the ids of the rollouts' turns."""
    spans = _spans(connection, rollout_ids)
    turns = defaultdict(list)
    query = select(Turns.rollout_id, Turns.turn_id, Turns.agent_name, Turns.parent_span_id)
    for row in rows_of_keys(connection, query, Turns.rollout_id, rollout_ids):
        turns[row.rollout_id].append(row)
    scopes: dict[str, TurnScope] = {}
    agents = select(Rollouts.rollout_id, Rollouts.agent)
    for rollout_id, agent in rows_of_keys(connection, agents, Rollouts.rollout_id, rollout_ids):
        scopes |= turn_scopes(turns[rollout_id], spans[rollout_id], agent)
    return scopes


def turns_by_agent(connection: Connection) -> dict[str, AgentTurns]:
    """By the name that the calls said (`Turn.agent_name`); those that said none are left out."""
    query = (
        select(Turns.agent_name, func.count(), func.count(TurnLedger.step))
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .where(Turns.agent_name.is_not(None))
        .group_by(Turns.agent_name)
        .order_by(Turns.agent_name)
    )
    return {
        str(name): AgentTurns(captured, trained)
        for name, captured, trained in connection.execute(query)
    }


def _spans(connection: Connection, rollout_ids: Sequence[str]) -> Mapping[str, list[_Span]]:
    """With the attributes that matter alone: others hold whole prompts."""
    query = select(
        Spans.rollout_id,
        Spans.span_id,
        Spans.parent_span_id,
        Spans.name,
        *(Spans.attributes[name].as_string() for name in _ATTRIBUTES),
    )
    found: Mapping[str, list[_Span]] = defaultdict(list)
    for row in rows_of_keys(connection, query, Spans.rollout_id, rollout_ids):
        rollout_id, span_id, parent_span_id, name, *said = row
        attributes = dict(zip(_ATTRIBUTES, said, strict=True))
        found[rollout_id].append(_Span(span_id, parent_span_id, name, attributes))
    return found

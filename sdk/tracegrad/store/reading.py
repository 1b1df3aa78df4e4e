"""Turns from rows: prompts rebuilt from the deltas, and proven against the stored digest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, select
from sqlalchemy.orm import aliased

from tracegrad.records import Turn
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.packing import ContextDigest, unpack_ids, unpack_json, unpack_logprobs
from tracegrad.store.schema import Turns
from tracegrad.store.sql import chunks

_RAW = (Turns.request, Turns.response)
_COLUMNS = [
    column for column in Turns.__table__.columns if column.name not in ("request", "response")
]


def turns_of(
    connection: Connection, rollout_ids: Sequence[str], *, raw: bool = True
) -> dict[str, list[Turn]]:
    """The turns of each rollout in order of capture; `raw` asks for requests and responses."""
    found: dict[str, list[Turn]] = {rollout_id: [] for rollout_id in rollout_ids}
    for ids in chunks(rollout_ids):
        query = _select(raw).where(Turns.rollout_id.in_(ids)).order_by(Turns.seq)
        for turn in _rebuild(connection.execute(query), raw=raw):
            found[turn.rollout_id].append(turn)
    return found


def find_turn(connection: Connection, turn_id: str, *, raw: bool = True) -> Turn | None:
    line = select(Turns.turn_id, Turns.parent_id).where(Turns.turn_id == turn_id)
    chain = line.cte("chain", recursive=True)
    above = aliased(Turns)
    chain = chain.union_all(
        select(above.turn_id, above.parent_id).join(chain, above.turn_id == chain.c.parent_id)
    )
    query = _select(raw).where(Turns.turn_id.in_(select(chain.c.turn_id))).order_by(Turns.seq)
    turns = _rebuild(connection.execute(query), raw=raw)
    return turns[-1] if turns else None


def _select(raw: bool) -> Select[Any]:
    return select(*_COLUMNS, *_RAW) if raw else select(*_COLUMNS)


def _rebuild(rows: Iterable[Row[Any]], *, raw: bool) -> list[Turn]:
    """`rows` hold every parent before its children."""
    contexts: dict[str, array[int]] = {}
    turns = []
    for row in rows:
        prompt = unpack_ids(row.delta)
        if row.parent_id is not None:
            prompt = contexts[row.parent_id] + prompt
        completion = unpack_ids(row.completion)
        context = prompt + completion
        if ContextDigest().add(context).value() != row.context_digest:
            raise StoreCorrupt(f"turn {row.turn_id}: its tokens are not the ones that were stored")
        contexts[row.turn_id] = context
        turns.append(
            Turn(
                turn_id=row.turn_id,
                rollout_id=row.rollout_id,
                parent_id=row.parent_id,
                fork_reason=row.fork_reason,
                dialect=row.dialect,
                model=row.model,
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                completion_logprobs=unpack_logprobs(row.logprobs),
                policy_versions=tuple((v, n) for v, n in row.policy_versions),
                sampling=row.sampling,
                finish_reason=row.finish_reason,
                untrainable=row.untrainable,
                parent_span_id=row.parent_span_id,
                request=unpack_json(row.request) if raw else None,
                response=unpack_json(row.response) if raw else None,
                created_at=row.created_at,
            )
        )
    return turns

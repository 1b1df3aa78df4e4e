"""Turns from rows: prompts rebuilt from the deltas, and proven against the stored digest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, select
from sqlalchemy.orm import aliased

from tracegrad.records import Turn
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.packing import ContextDigest, unpack_ids, unpack_json, unpack_logprobs
from tracegrad.store.rebuilding import Rebuilt, rebuild
from tracegrad.store.schema import Turns
from tracegrad.store.sql import chunks

T = TypeVar("T")

_RAW = (Turns.request, Turns.response, Turns.request_base, Turns.request_marks)
_COLUMNS = [
    column for column in Turns.__table__.columns if column.name not in {raw.key for raw in _RAW}
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
    turn = select(Turns.turn_id, Turns.parent_id, Turns.request_base).where(
        Turns.turn_id == turn_id
    )
    chain = turn.cte("chain", recursive=True)
    above = aliased(Turns)
    needed = [chain.c.parent_id, chain.c.request_base] if raw else [chain.c.parent_id]
    chain = chain.union(
        select(above.turn_id, above.parent_id, above.request_base).join(
            chain, above.turn_id.in_(needed)
        )
    )
    query = _select(raw).where(Turns.turn_id.in_(select(chain.c.turn_id))).order_by(Turns.seq)
    turns = _rebuild(connection.execute(query), raw=raw)
    return turns[-1] if turns else None


def _select(raw: bool) -> Select[Any]:
    return select(*_COLUMNS, *_RAW) if raw else select(*_COLUMNS)


def _rebuild(rows: Iterable[Row[Any]], *, raw: bool) -> list[Turn]:
    """`rows` hold every parent and every base before those who need it."""
    contexts: dict[str, array[int]] = {}
    requests: dict[str, Rebuilt] = {}
    turns = []
    for row in rows:
        try:
            turns.append(_turn(row, contexts, requests, raw=raw))
        except StoreCorrupt as error:
            raise StoreCorrupt(f"turn {row.turn_id}: {error}") from error
    return turns


def _turn(
    row: Row[Any], contexts: dict[str, array[int]], requests: dict[str, Rebuilt], *, raw: bool
) -> Turn:
    prompt = unpack_ids(row.delta)
    if row.parent_id is not None:
        prompt = _needed(contexts, row.parent_id) + prompt
    completion = unpack_ids(row.completion)
    context = prompt + completion
    if ContextDigest().add(context).value() != row.context_digest:
        raise StoreCorrupt("its tokens are not the ones that were stored")
    contexts[row.turn_id] = context
    logprobs = unpack_logprobs(row.logprobs)
    if len(logprobs) != len(completion):
        raise StoreCorrupt(f"{len(logprobs)} log-probabilities for {len(completion)} tokens")
    request, response = _texts(row, requests) if raw else (None, None)
    return Turn(
        turn_id=row.turn_id,
        rollout_id=row.rollout_id,
        parent_id=row.parent_id,
        fork_reason=row.fork_reason,
        dialect=row.dialect,
        model=row.model,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        completion_logprobs=logprobs,
        policy_versions=tuple((v, n) for v, n in row.policy_versions),
        sampling=row.sampling,
        finish_reason=row.finish_reason,
        untrainable=row.untrainable,
        parent_span_id=row.parent_span_id,
        request=request,
        response=response,
        created_at=row.created_at,
    )


def _texts(row: Row[Any], requests: dict[str, Rebuilt]) -> tuple[Any, Any]:
    request, response = unpack_json(row.request), unpack_json(row.response)
    if row.request_marks is None:
        return request, response
    base = _needed(requests, row.request_base) if row.request_base is not None else None
    requests[row.turn_id] = rebuilt = rebuild(request, response, row.request_marks, base)
    return rebuilt.request, response


def _needed(earlier: dict[str, T], turn_id: str) -> T:
    if turn_id not in earlier:
        raise StoreCorrupt(f"turn {turn_id}, which it continues, is not stored")
    return earlier[turn_id]

"""Facts into rows, inside the caller's transaction. Writing a fact again changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, false, select, true, update

from tracegrad.records import (
    Fact,
    Outcome,
    RewardGiven,
    RolloutFinished,
    RolloutOpened,
    SpanEnded,
    Turn,
)
from tracegrad.store.dialect import insert_new
from tracegrad.store.errors import FactRefused
from tracegrad.store.packing import ContextDigest, pack, pack_json
from tracegrad.store.schema import Rewards, Rollouts, RolloutTags, Spans, Turns
from tracegrad.store.sql import chunks

Values = dict[str, Any]


@dataclass
class _Sorted:
    first_seen: dict[str, float] = field(default_factory=dict)
    opened: list[RolloutOpened] = field(default_factory=list)
    finished: list[RolloutFinished] = field(default_factory=list)
    rewards: list[RewardGiven] = field(default_factory=list)
    spans: list[SpanEnded] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def saw(self, rollout_id: str, at: float) -> None:
        if not rollout_id:
            raise FactRefused("rollout_id: it is empty")
        self.first_seen[rollout_id] = min(at, self.first_seen.get(rollout_id, at))


def write_facts(connection: Connection, facts: Iterable[Fact]) -> None:
    """Raises `FactRefused` for a fact that contradicts itself or what is stored."""
    batch = _sort(facts)
    _insert(
        connection,
        Rollouts,
        [{"rollout_id": k, "opened": False, "opened_at": v} for k, v in batch.first_seen.items()],
    )
    _open(connection, batch.opened)
    _finish(connection, batch.finished)
    _insert(connection, Turns, _turn_rows(connection, batch.turns))
    _insert(connection, Rewards, [_reward_row(reward) for reward in batch.rewards])
    _insert(connection, Spans, [_span_row(span) for span in batch.spans])


def _sort(facts: Iterable[Fact]) -> _Sorted:
    batch = _Sorted()
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
                batch.turns.append(fact)
    return batch


def _insert(connection: Connection, table: Any, rows: Sequence[Values]) -> None:
    if rows:
        connection.execute(insert_new(table), rows)


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
    if not facts:
        return
    connection.execute(
        update(Rollouts).where(
            Rollouts.rollout_id == bindparam("which"), Rollouts.finished_at.is_(None)
        ),
        [
            {
                "which": fact.rollout_id,
                "outcome": Outcome(fact.outcome).value,
                "error": fact.error,
                "finished_at": fact.finished_at,
            }
            for fact in facts
        ],
    )


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


class _Context(NamedTuple):
    """What a child must begin with: so many tokens with this digest, in this rollout."""

    rollout_id: str
    tokens: int
    digest: bytes


def _turn_rows(connection: Connection, turns: Sequence[Turn]) -> list[Values]:
    if not turns:
        return []
    contexts = _stored_contexts(connection, {t.parent_id for t in turns if t.parent_id})
    rows = []
    for turn in turns:
        parent = _parent_of(turn, contexts)
        known = parent.tokens if parent else 0
        prompt = turn.prompt_token_ids
        digest = ContextDigest().add(prompt[:known])
        if parent and (len(prompt) < known or digest.value() != parent.digest):
            raise FactRefused(
                f"parent_id: the prompt of turn {turn.turn_id} does not begin with the "
                f"prompt and completion of turn {turn.parent_id}"
            )
        delta = prompt[known:]
        digest.add(delta).add(turn.completion_token_ids)
        tokens = len(prompt) + len(turn.completion_token_ids)
        contexts.setdefault(turn.turn_id, _Context(turn.rollout_id, tokens, digest.value()))
        rows.append(_turn_row(turn) | {"delta": pack(delta), "context_digest": digest.value()})
    return rows


def _parent_of(turn: Turn, contexts: dict[str, _Context]) -> _Context | None:
    if turn.parent_id is None:
        return None
    parent = contexts.get(turn.parent_id)
    if parent is None:
        raise FactRefused(
            f"parent_id: turn {turn.parent_id}, parent of {turn.turn_id}, is not stored; "
            "write parents first"
        )
    if parent.rollout_id != turn.rollout_id:
        raise FactRefused(
            f"parent_id: turn {turn.parent_id} belongs to rollout {parent.rollout_id}, "
            f"its child {turn.turn_id} to {turn.rollout_id}"
        )
    return parent


def _stored_contexts(connection: Connection, turn_ids: set[str]) -> dict[str, _Context]:
    found = {}
    for ids in chunks(sorted(turn_ids)):
        query = select(
            Turns.turn_id,
            Turns.rollout_id,
            Turns.prompt_tokens + Turns.completion_tokens,
            Turns.context_digest,
        ).where(Turns.turn_id.in_(ids))
        for turn_id, rollout_id, tokens, digest in connection.execute(query):
            found[turn_id] = _Context(rollout_id, tokens, digest)
    return found


def _turn_row(turn: Turn) -> Values:
    versions = turn.policy_versions
    return {
        "turn_id": turn.turn_id,
        "rollout_id": turn.rollout_id,
        "parent_id": turn.parent_id,
        "fork_reason": turn.fork_reason,
        "dialect": turn.dialect,
        "model": turn.model,
        "prompt_tokens": len(turn.prompt_token_ids),
        "completion_tokens": len(turn.completion_token_ids),
        "completion": pack(turn.completion_token_ids),
        "logprobs": pack(turn.completion_logprobs),
        "policy_versions": [list(span) for span in versions],
        "last_version": versions[-1][0] if versions else None,
        "sampling": turn.sampling,
        "finish_reason": turn.finish_reason,
        "untrainable": turn.untrainable,
        "parent_span_id": turn.parent_span_id,
        "request": pack_json(turn.request),
        "response": pack_json(turn.response),
        "created_at": turn.created_at,
    }

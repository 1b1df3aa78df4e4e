"""Scores that spans tell of, as rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from tracegrad.events import RewardGiven, SpanEnded
from tracegrad.proxy.capture.call_index import SeenCalls, turn_named_by
from tracegrad.proxy.otel.llm_span import Told
from tracegrad.proxy.otel.reported_call import turn_id_of
from tracegrad.proxy.otel.rollout_assignment import Naming
from tracegrad.proxy.otel.semconv.evaluations import Score
from tracegrad.proxy.store_async import asked

SOURCE = "otel"


class KnowsOrder(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def turn_order(self, rollout_id: str) -> Sequence[str]: ...


class Rewards:
    def __init__(self, naming: Naming, seen: SeenCalls, store: KnowsOrder) -> None:
        self._naming = naming
        self._seen = seen
        self._store = store

    async def given_by(self, told: Iterable[Told]) -> tuple[list[RewardGiven], str]:
        """After their turns are stored: a score of an LLM span is its turn's, any other the
        rollout's. Also what is wrong with one that is nobody's: its span alone has it. Raises
        what the store raises."""
        rewards: list[RewardGiven] = []
        problem = ""
        orders: dict[str, Sequence[str]] = {}
        scores = [(each.span, score) for each in told for score in each.scores]
        for span, score in scores:
            rollout_id = await self._rollout_of(span, score)
            if rollout_id is None:
                problem = problem or _nobodys(span, score)
                continue
            if rollout_id not in orders:
                orders[rollout_id] = await asked(self._store.turn_order, rollout_id)
            turn = _turn_of(span, score, orders[rollout_id])
            rewards.append(_reward(span, score, rollout_id, turn))
        return rewards, problem

    async def _rollout_of(self, span: SpanEnded, score: Score) -> str | None:
        answered = self._seen.rollout_of_answer(score.response_id)
        named = span.rollout_id or answered
        return named or await self._naming.only_rollout_of(span.trace_id)


def _nobodys(span: SpanEnded, score: Score) -> str:
    return (
        f"span {span.name[:100]!r}: its score {score.name[:100]!r} is no reward, since its trace is"
        " of no rollout: name one (tracegrad.rollout), or the answer (gen_ai.response.id)"
    )


def _turn_of(span: SpanEnded, score: Score, order: Sequence[str]) -> int | None:
    if score.whole:
        return None
    for turn_id in (turn_named_by(score.response_id), turn_id_of(span)):
        if turn_id in order:
            return order.index(turn_id)
    return None


def _reward(span: SpanEnded, score: Score, rollout_id: str, turn: int | None) -> RewardGiven:
    name = f"score {span.trace_id} {span.span_id} {score.key}"
    return RewardGiven(
        reward_id=blake2b(name.encode(), digest_size=16).hexdigest(),
        rollout_id=rollout_id,
        value=score.value,
        name=score.name,
        turn=turn,
        source=SOURCE,
        given_at=span.end_ns / 1e9,
    )

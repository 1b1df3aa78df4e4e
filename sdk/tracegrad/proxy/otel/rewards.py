"""Scores that spans tell of, as rewards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from tracegrad import genai_attributes
from tracegrad.events import Reward, Span
from tracegrad.proxy.capture.call_index import CallIndex, turn_id_in_response
from tracegrad.proxy.otel.llm_span import ReportedSpan
from tracegrad.proxy.otel.rollout_assignment import RolloutAssignment
from tracegrad.proxy.otel.semconv.evaluations import Evaluation
from tracegrad.proxy.otel.span_to_turn import turn_id_of
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.read.reward_arrival import RewardTarget

SOURCE = "otel"


class TurnOrder(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def turn_order(self, rollout_id: str) -> Sequence[str]: ...
    def reward_targets(self, rollout_ids: Collection[str]) -> Sequence[RewardTarget]: ...


class SpanRewards:
    def __init__(self, naming: RolloutAssignment, seen: CallIndex, store: TurnOrder) -> None:
        self._naming = naming
        self._seen = seen
        self._store = store

    async def of_spans(self, spans: Iterable[ReportedSpan]) -> tuple[list[Reward], str]:
        """After their turns are stored: a score of an LLM span is its turn's, any other the
        rollout's. Also what is wrong with one that is nobody's: its span alone has it. Raises
        what the store raises."""
        rewards: list[Reward] = []
        problem = ""
        orders: dict[str, Sequence[str]] = {}
        scores = [(each.span, score) for each in spans for score in each.evaluations]
        for span, score in scores:
            rollout_id = await self._rollout_of(span, score)
            if rollout_id is None:
                problem = problem or _nobodys(span, score)
                continue
            if rollout_id not in orders:
                orders[rollout_id] = await run_in_thread(self._store.turn_order, rollout_id)
            turn = _turn_of(span, score, orders[rollout_id])
            rewards.append(_reward(span, score, rollout_id, turn))
        return rewards, problem or await self._of_unknown(rewards)

    async def _of_unknown(self, rewards: Sequence[Reward]) -> str:
        """Of rollouts that nobody opened and that no call belongs to, so far."""
        names = list(dict.fromkeys(reward.rollout_id for reward in rewards))
        if not names:
            return ""
        targets = await run_in_thread(self._store.reward_targets, names)
        known = {target.rollout_id for target in targets if target.is_known}
        for name in names:
            if name not in known:
                return (
                    f"a score of rollout {name[:100]!r} is kept as its reward, but nobody opened"
                    " such a rollout and no call belongs to it so far"
                )
        return ""

    async def _rollout_of(self, span: Span, score: Evaluation) -> str | None:
        answered = self._seen.rollout_of_response(score.response_id)
        named = span.rollout_id or answered
        return named or await self._naming.only_rollout_of(span.trace_id)


def _nobodys(span: Span, score: Evaluation) -> str:
    return (
        f"span {span.name[:100]!r}: its score {score.name[:100]!r} is no reward, since its trace is"
        " of no rollout: name one (tracegrad.rollout), or the answer"
        f" ({genai_attributes.RESPONSE_ID})"
    )


def _turn_of(span: Span, score: Evaluation, order: Sequence[str]) -> int | None:
    if score.whole:
        return None
    for turn_id in (turn_id_in_response(score.response_id), turn_id_of(span)):
        if turn_id in order:
            return order.index(turn_id)
    return None


def _reward(span: Span, score: Evaluation, rollout_id: str, turn: int | None) -> Reward:
    name = f"score {span.trace_id} {span.span_id} {score.key}"
    return Reward(
        reward_id=blake2b(name.encode(), digest_size=16).hexdigest(),
        rollout_id=rollout_id,
        value=score.value,
        name=score.name,
        turn=turn,
        source=SOURCE,
        given_at=span.end_ns / 1e9,
    )

"""LLM spans into turns: with what was said, and without tokens."""

from __future__ import annotations

from hashlib import blake2b

from tracegrad.events import Span, Turn, logprob_array, token_id_array
from tracegrad.proxy.dialects.base import Call
from tracegrad.proxy.dialects.otel import OtelDialect
from tracegrad.proxy.otel.semconv import LlmCall
from tracegrad.proxy.prompt_reuse import (
    CachedTurn,
    ContinuationPlan,
    PromptReuse,
    TreePosition,
    cached_turn,
)

DIALECT = OtelDialect.name


def turn_id_of(span: Span) -> str:
    """Always the same for a span: sending it twice makes one turn."""
    name = f"turn {span.trace_id} {span.span_id}"
    return blake2b(name.encode(), digest_size=16).hexdigest()


def as_call(span: Span, llm: LlmCall) -> Call:
    return Call(DIALECT, llm.request, llm.request, stream=False, turn_id=turn_id_of(span))


async def positioned_turn(
    continuation: PromptReuse, rollout_id: str, span: Span, llm: LlmCall
) -> tuple[Turn, CachedTurn]:
    """The turn, and what later turns need to know of it. Raises what the store raises.

    Its parent is the latest turn of the rollout whose words it goes on from; no tokens prove it.
    """
    call = as_call(span, llm)
    try:
        plan, place = await continuation.position_reported(rollout_id, call)
    except RecursionError:  # the store says what is wrong with it
        plan, place = ContinuationPlan(rollout_id, None), TreePosition(rollout_id, None, None)
    turn = Turn(
        turn_id=call.turn_id,
        rollout_id=rollout_id,
        parent_id=place.parent_id,
        fork_reason=place.fork_reason,
        dialect=DIALECT,
        model=llm.model,
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        sampling=llm.sampling,
        finish_reason=llm.finish_reason,
        untrainable="no_tokens",
        parent_span_id=span.span_id,
        request=llm.request,
        response=llm.response,
        created_at=span.start_ns / 1e9,
    )
    return turn, cached_turn(turn, plan.conversation)

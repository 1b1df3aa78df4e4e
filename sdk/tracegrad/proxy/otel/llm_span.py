"""A span with all that it tells of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracegrad.events import SpanEnded
from tracegrad.proxy.otel.semconv import LlmCall, is_genai, llm_call
from tracegrad.proxy.otel.semconv.evaluations import Score, scores_of

Place = tuple[str, str]  # trace and span


@dataclass(frozen=True, slots=True)
class Told:
    """`llm`: the call, where it is an LLM span. `genai`: it is an agent's, by its attributes.
    `problem`: what of it cannot be read, or is not taken."""

    span: SpanEnded
    llm: LlmCall | None
    scores: Sequence[Score]
    genai: bool
    problem: str = ""

    @property
    def place(self) -> Place:
        return self.span.trace_id, self.span.span_id


def told_by(span: SpanEnded) -> Told:
    """Reads whatever the span holds: work for a thread, where spans are large."""
    try:
        return Told(span, llm_call(span), scores_of(span), is_genai(span))
    except RecursionError:
        problem = f"span {span.name[:100]!r}: it is kept, but nested too deeply to be read"
        return Told(span, None, (), is_genai(span), problem)


def without_scores(told: Told) -> Told:
    """As the agent itself may tell it, which is the one that is scored."""
    if not told.scores:
        return told
    problem = (
        f"span {told.span.name[:100]!r}: its score {told.scores[0].name[:100]!r} is no reward,"
        " since it came with the agent's own key: send evaluations with the admin key, or with one"
        " that was minted for events"
    )
    return replace(told, scores=(), problem=told.problem or problem)

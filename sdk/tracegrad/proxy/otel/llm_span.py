"""A span with all that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracegrad.events import Span
from tracegrad.proxy.otel.semconv import LlmCall, is_genai, llm_call
from tracegrad.proxy.otel.semconv.evaluations import Evaluation, evaluations_of

SpanKey = tuple[str, str]  # trace and span


@dataclass(frozen=True, slots=True)
class ReportedSpan:
    """`llm`: the call, where it is an LLM span. `genai`: it is an agent's, by its attributes.
    `problem`: what of it cannot be read, or is not taken."""

    span: Span
    llm: LlmCall | None
    evaluations: Sequence[Evaluation]
    is_genai: bool
    problem: str = ""

    @property
    def key(self) -> SpanKey:
        return self.span.trace_id, self.span.span_id


def read_span(span: Span) -> ReportedSpan:
    """Reads whatever the span holds: work for a thread, where spans are large."""
    try:
        return ReportedSpan(span, llm_call(span), evaluations_of(span), is_genai(span))
    except RecursionError:
        problem = f"span {span.name[:100]!r}: it is kept, but nested too deeply to be read"
        return ReportedSpan(span, None, (), is_genai(span), problem)


def without_evaluations(reported: ReportedSpan) -> ReportedSpan:
    """As the agent itself may tell it, which is the one that is scored."""
    if not reported.evaluations:
        return reported
    problem = (
        f"span {reported.span.name[:100]!r}: its score {reported.evaluations[0].name[:100]!r} is no"
        " reward,"
        " since it came with the agent's own key: send evaluations with the admin key, or with one"
        " that was minted for events"
    )
    return replace(reported, evaluations=(), problem=reported.problem or problem)

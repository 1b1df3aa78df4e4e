"""Spans of other libraries: which of them are LLM calls, and what was said in them."""

from __future__ import annotations

from tracegrad import genai_attributes
from tracegrad.events import Span
from tracegrad.proxy.otel.semconv import openinference, opentelemetry, traceloop
from tracegrad.proxy.otel.semconv.chat_completion import LlmCall

__all__ = ["LlmCall", "is_genai", "llm_call"]

_PREFIXES = (genai_attributes.PREFIX, "openinference.", "traceloop.", "llm.")


def llm_call(span: Span) -> LlmCall | None:
    """The call that the span reports; None for a span that is none.

    Many spans carry names of several conventions. The one that its library wrote for decides.
    """
    attributes = span.attributes
    if (kind := attributes.get(openinference.KIND)) is not None:
        return openinference.read(span) if str(kind).upper() == "LLM" else None
    flat = traceloop.is_flat(attributes)
    if (operation := attributes.get(genai_attributes.OPERATION)) is not None:
        if str(operation) not in opentelemetry.LLM_OPERATIONS:
            return None
        return traceloop.read(span) if flat else opentelemetry.read(span)
    # Before there was a name for the operation, there was Traceloop's; and else whoever named a
    # model had called it.
    kind = attributes.get(traceloop.REQUEST_TYPE)
    if not flat and (
        str(kind) not in traceloop.LLM_TYPES
        if kind
        else genai_attributes.REQUEST_MODEL not in attributes
    ):
        return None
    return traceloop.read(span) if flat else opentelemetry.read(span)


def is_genai(span: Span) -> bool:
    """Whether the span is an agent's at all: a model's call, a tool, a chain, a retriever."""
    return any(name.startswith(_PREFIXES) for name in span.attributes)

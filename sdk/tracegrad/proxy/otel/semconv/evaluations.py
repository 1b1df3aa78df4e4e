"""Evaluations that spans tell of: OpenTelemetry's event (`genai_attributes.EVALUATION`), and
OpenInference's attributes `evaluations.0.evaluation.score` (or `annotations`; with `trace.` before
them, of the whole trace). Results without a number (labels alone) are no rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracegrad import genai_attributes
from tracegrad.events import Json, Span
from tracegrad.proxy.otel.semconv.flat_attributes import events_of, in_index_order, unflatten

# Of the span, or of all its trace.
_FLAT = (
    ("evaluations", "evaluation", False),
    ("annotations", "annotation", False),
    ("trace.evaluations", "evaluation", True),
    ("trace.annotations", "annotation", True),
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`key` is its own among the span's. `whole`: of the whole trace, not of the span.
    `response_id`: the answer that it is of, where it says so."""

    key: str
    name: str
    value: float
    whole: bool = False
    response_id: str | None = None


def evaluations_of(span: Span) -> list[Evaluation]:
    return [*_from_events(span), *_from_attributes(span)]


def _from_events(span: Span) -> Iterator[Evaluation]:
    results = (event for event in events_of(span) if event.name == genai_attributes.EVALUATION)
    for number, (_, attributes) in enumerate(results):
        value = _value(attributes, genai_attributes.EVALUATION_SCORE)
        name = attributes.get(genai_attributes.EVALUATION_NAME)
        if value is None or not name:
            continue
        answer = attributes.get(genai_attributes.RESPONSE_ID)
        yield Evaluation(
            f"event.{number}", str(name), value, response_id=str(answer) if answer else None
        )


def _from_attributes(span: Span) -> Iterator[Evaluation]:
    for prefix, word, whole in _FLAT:
        for number, branch in enumerate(in_index_order(unflatten(span.attributes, prefix))):
            score = branch.get(word)
            if not isinstance(score, Mapping):
                continue
            value, name = _value(score, "score"), score.get("name")
            if value is not None and name:
                yield Evaluation(f"{prefix}.{number}", str(name), value, whole=whole)


def result_attributes(name: str, value: float, label: str | None, comment: str | None) -> Json:
    """Of an event `genai_attributes.EVALUATION`."""
    found = {
        genai_attributes.EVALUATION_NAME: name,
        genai_attributes.EVALUATION_SCORE: value,
        genai_attributes.EVALUATION_LABEL: label,
        genai_attributes.EVALUATION_EXPLANATION: comment,
    }
    return {key: each for key, each in found.items() if each is not None}


def _value(attributes: Mapping[str, Any], name: str) -> float | None:
    value = attributes.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None

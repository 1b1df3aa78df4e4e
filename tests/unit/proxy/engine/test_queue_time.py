"""What vLLM says of its queue, and what else may stand there."""

from __future__ import annotations

import pytest

from tracegrad.events import Json
from tracegrad.proxy.engine.response import engine_queued_s


def test_milliseconds_are_seconds() -> None:
    assert engine_queued_s({"metrics": {"queue_time_ms": 1500.0}}) == 1.5
    assert engine_queued_s({"metrics": {"queue_time_ms": 0}}) == 0.0


@pytest.mark.parametrize("value", [None, True, "1", -1.0, float("inf"), float("nan"), [1.0]])
def test_what_is_no_time_is_not_known(value: object) -> None:
    assert engine_queued_s({"metrics": {"queue_time_ms": value}}) is None


@pytest.mark.parametrize("answer", [{}, {"metrics": None}, {"metrics": {}}, {"metrics": [1]}])
def test_an_engine_that_says_nothing(answer: Json) -> None:
    assert engine_queued_s(answer) is None

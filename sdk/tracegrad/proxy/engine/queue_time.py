"""How long a request waited in vLLM's own queue.

vLLM says it of each request in its last words, where it was started with
`--enable-per-request-metrics`: the time from the scheduler's queue to the first step that the
request was a part of. It says nothing of calls with several choices or prompts.
"""

from __future__ import annotations

from math import isfinite

from tracegrad.events import Json


def engine_queued_s(answer: Json) -> float | None:
    """Seconds, of a whole answer or of a stream's last chunk; None: the engine does not say."""
    metrics = answer.get("metrics")
    value = metrics.get("queue_time_ms") if isinstance(metrics, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1000 if isfinite(value) and value >= 0 else None

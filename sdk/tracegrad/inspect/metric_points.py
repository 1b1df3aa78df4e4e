"""A step's metrics: as flat numbers, which every sink writes in its own words, and read again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracegrad.store import PolicyVersion, StepRecord

# The version that a step's weights became, beside its metrics.
VERSION = "policy_version"
PUSH = "push"
# Names that were recorded before 0.1.
_EARLIER = {
    "expert_tokens": "demonstration_tokens",
    "routes_known_share": "expert_routing_known_share",
}
_EARLIER_GAP = re.compile(r"^(tokens|difference|k1|k3|clipped)_gap_(?=\d)")


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Numbers of one moment; a nested name is `seconds/train`."""

    step: int
    created_at: float  # unix seconds
    values: dict[str, float]


def finite_number(value: object) -> float | None:
    """What a store's JSON may hold in its place is None: a text, NaN, an integer beyond floats."""
    if type(value) is float:  # nearly all of the tens of thousands that charts ask for
        return value if math.isfinite(value) else None
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def step_point(record: StepRecord) -> MetricPoint:
    values = {VERSION: float(record.version), **dict(_numbers("", record.metrics))}
    return MetricPoint(record.step, record.created_at, values)


def push_point(version: PolicyVersion) -> MetricPoint:
    """What the check of a push found: how far served and trained log-probabilities are apart."""
    gap, seconds = (_table(version.detail.get(name)) for name in ("gap", "seconds"))
    found = {
        "failed": version.state == "failed",
        "seconds": push_seconds(version),
        **{f"seconds/{stage}": took for stage, took in seconds.items()},
        "paused_s": version.detail.get("paused_s"),
        "held_s": version.detail.get("held_s"),
        "bytes": version.detail.get("bytes"),
        "gap_mean": gap.get("mean"),
        "gap_p50": gap.get("p50"),
        "gap_p99": gap.get("p99"),
        "gap_max": gap.get("max"),
    }
    numbers = {f"{PUSH}/{name}": finite_number(value) for name, value in found.items()}
    values = {name: value for name, value in numbers.items() if value is not None}
    return MetricPoint(version.step or 0, version.created_at, values)


def push_seconds(version: PolicyVersion) -> float:
    """All stages of its push together."""
    took = map(finite_number, _table(version.detail.get("seconds")).values())
    return math.fsum(each for each in took if each is not None)


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers(prefix: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, float) or finite_number(value) is not None:
            yield prefix + name, float(value)


def trained_turns(metrics: Mapping[str, float]) -> int:
    """Turns that the step trained, each once; `turns_trained` counts them in every pass."""
    trained = metrics.get("turns", metrics.get("turns_trained", 0.0))
    return int(trained - metrics.get("turns_skipped", 0.0))


def has_gap(metrics: Mapping[str, float]) -> bool:
    """Whether the step had tokens of the current version; without any, a gap of 0 means nothing."""
    return "gap_max" in metrics and metrics.get("gap_tokens", 1.0) > 0


def current_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded step's metrics under today's names; stores from before 0.1 have others."""
    return {_EARLIER_GAP.sub(r"\1_lag_", _EARLIER.get(n, n)): v for n, v in metrics.items()}

"""A step's metrics as flat numbers, which every sink writes in its own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracegrad.store import PolicyVersion, StepRecord

# The version that a step's weights became, beside its metrics.
VERSION = "policy_version"
PUSH = "push"


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Numbers of one moment; a nested name is `seconds/train`."""

    step: int
    created_at: float  # unix seconds
    values: dict[str, float]


def step_point(record: StepRecord) -> MetricPoint:
    values = {VERSION: float(record.version), **dict(_numbers("", record.metrics))}
    return MetricPoint(record.step, record.created_at, values)


def push_point(version: PolicyVersion) -> MetricPoint:
    """What the check of a push found: how far served and trained log-probabilities are apart."""
    gap = version.detail.get("gap") or {}
    told = {
        "failed": float(version.state == "failed"),
        "seconds": sum(version.detail.get("seconds", {}).values()),
        "gap_mean": gap.get("mean"),
        "gap_max": gap.get("max"),
    }
    values = {f"{PUSH}/{name}": value for name, value in told.items() if value is not None}
    return MetricPoint(version.step or 0, version.created_at, values)


def _numbers(prefix: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, int | float):
            yield prefix + name, float(value)

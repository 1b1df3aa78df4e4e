"""Metrics: their names and units, and where they go besides the store."""

from .names import METRICS, Metric, metric
from .settings import MetricsSettings, WandbSettings
from .sinks import Sinks
from .speed import of_speed

__all__ = [
    "METRICS",
    "Metric",
    "MetricsSettings",
    "Sinks",
    "WandbSettings",
    "metric",
    "of_speed",
]

"""Metrics: their names and units, and where they go besides the store."""

from tracegrad_trainer.engine.speed import of_speed
from tracegrad_trainer.metrics.config import MetricsSettings, WandbSettings
from tracegrad_trainer.metrics.names import METRICS, Metric, metric
from tracegrad_trainer.metrics.sinks import Sinks

__all__ = [
    "METRICS",
    "Metric",
    "MetricsSettings",
    "Sinks",
    "WandbSettings",
    "metric",
    "of_speed",
]

"""Metrics: their names and units, and where they go besides the store."""

from tracegrad.inspect.step_metrics import METRICS, Metric, find_metric
from tracegrad_trainer.metrics.config import MetricsSettings, WandbSettings
from tracegrad_trainer.metrics.sinks import MetricSinks

__all__ = ["METRICS", "Metric", "MetricSinks", "MetricsSettings", "WandbSettings", "find_metric"]

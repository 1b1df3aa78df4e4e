"""Metrics as TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tracegrad.inspect.metric_points import MetricPoint


class TensorBoardSink:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        """Raises OSError: the folder cannot be written."""
        from torch.utils.tensorboard import SummaryWriter  # an extra

        writer: Any = SummaryWriter  # has no types
        self._writer = writer(str(folder))

    def write(self, point: MetricPoint) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step, walltime=point.created_at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

"""Metrics as a run at Weights & Biases. A trainer that starts again goes on with its run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from tracegrad.inspect.metric_points import MetricPoint
from tracegrad_trainer.metrics.config import WandbSettings


class WandbSink:
    name = "wandb"

    def __init__(self, settings: WandbSettings, state_dir: Path) -> None:
        """Raises ValueError: it cannot begin as it is set; OSError: the folder is not writable."""
        import wandb  # an extra

        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name,
                mode=settings.mode,
                dir=str(state_dir),
                id=_run_id(state_dir),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ValueError(f"metrics.wandb: {error}") from None
        # Their own counter must rise with every line; ours may begin again after a crash.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, point: MetricPoint) -> None:
        self._run.log({"step": point.step, **point.values})

    def close(self) -> None:
        self._run.finish()


def _run_id(state_dir: Path) -> str:
    path = state_dir / "run" / "wandb-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text()

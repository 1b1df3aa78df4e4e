"""The picture of a training run: success in training and on held-out tasks, by policy version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BLUE, GREEN = "#2a6f97", "#2f8f5b"


class CurvePoint(NamedTuple):
    """The mean reward of `rollouts` at a policy version."""

    version: int
    reward: float
    rollouts: int


def draw_learning_curve(
    path: Path, training: Sequence[CurvePoint], held_out: Sequence[CurvePoint]
) -> Path | None:
    """Writes a PNG; None: matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for points, colour, marker, name in (
        (training, BLUE, ".", "training"),
        (held_out, GREEN, "D", "held-out"),
    ):
        if points:
            label = f"{name}: {points[0].reward:.2f} → {points[-1].reward:.2f}"
            versions, rewards = [p.version for p in points], [p.reward for p in points]
            axes.plot(versions, rewards, color=colour, marker=marker, label=label)
    axes.set_xlabel("policy version")
    axes.set_ylabel("mean reward")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if training or held_out:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path

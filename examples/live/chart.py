"""The picture: what people thought of the replies, second by second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .run import Result

WINDOW = 150  # replies of one point
COLOURS = ("#2a6f97", "#e07a1f", "#2f8f5b")
GREY = "#8a9099"


def draw(path: Path, results: Sequence[tuple[str, Result]]) -> Path:
    """Writes a PNG. `results`: (name, what a run came to)."""
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    approval, asked = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (name, result), colour in zip(results, COLOURS, strict=False):
        at = list(range(WINDOW, len(result.replies) + 1, WINDOW // 5))
        windows = [result.replies[end - WINDOW : end] for end in at]
        approval.plot(
            at, [_mean([r.approval for r in w]) for w in windows], color=colour, label=name
        )
        asked.plot(at, [_mean([r.asked_back for r in w]) for w in windows], color=colour)
        for moment in result.moments:
            if moment.name in ("rolled back", "exploited"):
                for axes in (approval, asked):
                    axes.axvline(moment.replies, color=colour, linestyle=(0, (2, 3)), linewidth=1)
    approval.set_ylabel("approval of replies")
    asked.set_ylabel("share that asks back")
    asked.set_xlabel("replies (dotted: a guard had an earlier version served again)")
    approval.set_title(
        "A service that learns from late thumbs, and an exploit that is caught",
        loc="left",
        fontweight="bold",
    )
    for axes in (approval, asked):
        axes.set_ylim(-0.02, 1.02)
        axes.grid(axis="y", color=GREY, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    approval.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

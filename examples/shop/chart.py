"""The picture of the learning curve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .rollouts import Score

BLUE, ORANGE, GREEN, GREY = "#2a6f97", "#e07a1f", "#2f8f5b", "#8a9099"


@dataclass(frozen=True, slots=True)
class Exam:
    """The held-out success of one policy version, at temperature 0 and at temperature 1."""

    version: int
    greedy: Score
    sampled: Score


def scores_by_version(rewards: Iterable[tuple[int, float]]) -> dict[int, Score]:
    """(policy version, reward) of each training rollout -> its score, by ascending version."""
    rewards_of: dict[int, list[float]] = defaultdict(list)
    for version, reward in rewards:
        rewards_of[version].append(reward)
    return {
        version: Score(round(sum(rewards_of[version])), len(rewards_of[version]))
        for version in sorted(rewards_of)
    }


def draw(
    path: Path,
    rewards: Iterable[tuple[int, float]],
    before: Exam,
    after: Exam,
    title: str = "",
    split: str = "held-out",
) -> Path:
    """Writes a PNG: success in training per policy version, and the held-out exams.

    Args:
        path: of the picture; its folder is made.
        rewards: (policy version, reward 0 or 1) of the training rollouts, in any order.
        before: the exam before training.
        after: the exam after it.
        title: a line above the picture.
        split: what the exams' tasks are called.
    """
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _training(axes, scores_by_version(rewards))
    _exams(axes, before, after, "greedy", split, GREEN, "D")
    _exams(axes, before, after, "sampled", split, ORANGE, "o")
    _frame(axes, before.version, after.version, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _training(axes: Any, scores: dict[int, Score]) -> None:
    versions = list(scores)
    rates = [score.rate for score in scores.values()]
    errors = [score.error for score in scores.values()]
    low = [max(0.0, rate - error) for rate, error in zip(rates, errors, strict=True)]
    high = [min(1.0, rate + error) for rate, error in zip(rates, errors, strict=True)]
    axes.fill_between(versions, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(versions, rates, color=BLUE, linewidth=2, marker=".", label="training tasks, sampled")


def _exams(
    axes: Any, before: Exam, after: Exam, kind: str, split: str, colour: str, marker: str
) -> None:
    scores: list[Score] = [getattr(before, kind), getattr(after, kind)]
    # Side by side: at the end both are often the same.
    shift = -0.12 if kind == "greedy" else 0.12
    at = [before.version + shift, after.version + shift]
    rates, errors = [score.rate for score in scores], [score.error for score in scores]
    label = f"{split} tasks, {kind}: {rates[0]:.2f} → {rates[1]:.2f}"
    axes.plot(at, rates, color=colour, linewidth=1, linestyle=(0, (2, 3)), alpha=0.4)
    axes.errorbar(
        at, rates, yerr=errors, color=colour, marker=marker, markersize=7, linestyle="none",
        capsize=3, label=label, zorder=5,
    )  # fmt: skip


def _frame(axes: Any, first: int, last: int, title: str) -> None:
    step = max(1, (last - first) // 16)
    axes.set_xticks([*range(first, last, step), last] if last > first else [first])
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_ylim(-0.02, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("policy version")
    axes.set_ylabel("success")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)

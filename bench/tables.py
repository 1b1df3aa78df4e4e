"""Tables of the benchmarks' pages, and the goals that head them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    wanted: str
    measured: str
    met: bool


def goal_table(goals: Sequence[Goal]) -> str:
    rows = [[g.what, g.wanted, g.measured, "yes" if g.met else "**no**"] for g in goals]
    return markdown(["", "goal", "measured", "met"], rows)


def number(value: float | None) -> str:
    """Three digits that mean something; nothing for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

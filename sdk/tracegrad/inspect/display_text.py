"""Small texts that the command line and the web page show alike: numbers, safe strings, states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tracegrad.events import Turn
from tracegrad.store import RolloutSummary
from tracegrad.store.ledger.intake import DEAD_AFTER_S
from tracegrad.store.types import HELD_OUT
from tracegrad.text_format import format_count, format_duration, format_elapsed


def printable(text: str) -> str:
    """Without control characters: what an agent read must not drive the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def one_line(text: str) -> str:
    """Printable, with every run of white space as one space."""
    return " ".join(printable(text).split())


def clip(text: str, *, lines: int, characters: int) -> str:
    """At most so much of a text, and how much was left out."""
    kept = "\n".join(text.split("\n")[:lines])[:characters].rstrip()
    left = len(text) - len(kept)
    return text if left <= 20 else f"{kept} … ({left:,} more characters)"


def format_number(value: float) -> str:
    return f"{value:.4g}"


def metric_text(value: float, unit: str) -> str:
    """As people read a metric of this unit; the unit itself only where it is part of that."""
    if not math.isfinite(value):
        return str(value)
    if unit == "share":
        return f"{value:.1%}"
    if unit == "s" and value >= 0:
        return format_duration(value)
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else format_number(value)


def format_ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def finish_reason_text(turn: Turn) -> str:
    """How its reply ended, where that is known."""
    return turn.finish_reason or ("cut off" if turn.untrainable == "aborted" else "")


def tag_text(tags: Mapping[str, str]) -> str:
    return " ".join(f"{one_line(key)}={one_line(value)}" for key, value in tags.items())


def training_text(row: RolloutSummary) -> str:
    """The state of the rollout on its way to training, in the words of `--state` and `explain`; of
    a trained one the step."""
    if row.state == "consumed":
        if row.trained_turns:
            return f"step {row.consumed_step}"
        return HELD_OUT if row.held_out else "skipped"
    return row.state


def intake_text(*, paced: bool, rollouts: int | None, reason: str, silent_for_s: float) -> str:
    """Whether drivers wait, and for what: of an `IntakeState` of which `silent_for_s` is known.
    `rollouts` None: as many as they like."""
    if silent_for_s > DEAD_AFTER_S:
        silent = format_elapsed(silent_for_s)
        return f"wait for nobody: the trainer's last sign came {silent} ago"
    if not paced or (rollouts is None and not reason):
        return "wait for nobody: no setting bounds what they open"
    return f"wait: {reason}" if reason else f"may open {format_count(rollouts or 0, 'rollout')} now"

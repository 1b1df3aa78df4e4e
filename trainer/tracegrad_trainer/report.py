"""Numbers as people read them: a step as one line, the state of a run as tables."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracegrad.records import Json
from tracegrad.store import StepRecord
from tracegrad_trainer.status import Status

# What the trainer's log says in full: see `StepResult.mismatch`.
MISMATCH = " TOO LARGE: serving and training engine disagree (ranks.log)"


def step_line(step: StepRecord) -> str:
    """`step 7 → version 7 · reward 0.61 · 128 rollouts, 241 turns · gap 3.1e-06 · 5.9 s (...)`"""
    m = step.metrics
    parts = [
        f"step {step.step} → version {step.version}",
        f"reward {m.get('reward_mean', 0):.2f}",
        f"{m.get('rollouts', 0):.0f} rollouts, {m.get('turns_trained', 0):.0f} turns trained",
        f"gap {m.get('gap_max', 0):.1e}{MISMATCH if m.get('mismatch') else ''}",
        shares(m.get("seconds", {})),
    ]
    return " · ".join(part for part in parts if part)


def shares(seconds: Mapping[str, float]) -> str:
    """`5.9 s (wait 81 %, train 12 %, push 5 %)`: where the time went, largest first."""
    total = sum(seconds.values())
    if not total:
        return ""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {value / total:.0%}" for name, value in ordered)
    return f"{total:.1f} s ({text})"


def render(status: Status) -> RenderableType:
    """`trainer status` for a terminal."""
    parts: list[RenderableType] = [_headline(status), _facts(status)]
    if status.not_trained:
        parts.append(_reasons(status.not_trained))
    if status.steps:
        parts.append(_steps(status.steps))
    return Group(*parts)


def _headline(status: Status) -> Text:
    if not status.processes:
        return Text("not running; this is what the store holds", style="yellow")
    since = ago(status.since) if status.since is not None else ""
    line = Text(f"{status.stage}", style="bold green" if status.stage == "serving" else "bold")
    return line.append(f" at {status.url}  (for {since}; {status.doing})", style="default")


def _facts(status: Status) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    version = "none yet" if status.version is None else str(status.version)
    if status.failed_versions:
        version += f"  (failed pushes: {', '.join(map(str, status.failed_versions))})"
    table.add_row("policy version", version)
    if status.push is not None and (gap := status.push["gap"]):
        told = f"{gap['mean']:.1e} on average, {gap['max']:.1e} at most"
        table.add_row("gap after push", f"{told} (nats, served against trained)")
    table.add_row("turns captured", str(status.turns_captured))
    table.add_row("turns trained", f"{status.turns_trained}  in {status.steps_total} steps")
    if status.removed:
        gone = f"{status.removed['turns']}  of {status.removed['rollouts']} rollouts (prune)"
        table.add_row("turns removed", f"{gone}, {status.removed['trained']} of them were trained")
    for name, success in status.success.items():
        rate = f"{success['mean']:.2f} ± {success['error']:.2f}"
        table.add_row(f"reward {name}", f"{rate}  over the last {success['rollouts']} rollouts")
    if status.seconds:
        steps = f"the last {status.seconds_steps} steps" if status.seconds_steps > 1 else "a step"
        table.add_row("time", f"{shares(status.seconds)}  over {steps}")
    return table


def _reasons(not_trained: Mapping[str, int]) -> Table:
    # The title is a column's name: Rich would wrap it to the table's width.
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("turns not trained")
    table.add_column(justify="right")
    for reason, count in sorted(not_trained.items(), key=lambda item: -item[1]):
        table.add_row(reason, str(count))
    return table


# Heading, metric, format: what a line of `trainer status` says of a step, most telling first.
_OF_STEP = (
    ("reward", "reward_mean", ".3f"),
    ("spread", "group_spread", ".2f"),
    ("turns", "turns_trained", ".0f"),
    ("loss", "loss", "+.3f"),
    ("grad", "grad_norm", ".2g"),
    ("ent.", "entropy", ".2f"),
    ("k3", "k3", ".0e"),
    ("ess", "ess", ".2f"),
    ("clip", "clipped_turn_share", ".0%"),
    ("lag", "staleness_mean", ".1f"),
    ("gap", "gap_max", ".0e"),
    ("tok/s", "tokens_per_second", ""),
)


def _steps(steps: list[Json]) -> Table:
    """Columns of metrics that none of the steps has are left out."""
    shown = [one for one in _OF_STEP if any(one[1] in step["metrics"] for step in steps)]
    table = Table(title="last steps", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.pad_edge = False
    for name in ("step", *(heading for heading, _, _ in shown), "ago"):
        table.add_column(name, justify="right")
    for step in steps:
        m = step["metrics"]
        cells = [_cell(m.get(name), how) for _, name, how in shown]
        table.add_row(str(step["step"]), *cells, ago(step["created_at"]))
    return table


def _cell(value: float | None, how: str) -> str:
    """Without `how`: in at most four characters."""
    if value is None:
        return "–"
    if how:
        return format(value, how)
    return next(
        (
            f"{value / size:.0f}{unit}"
            for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k"))
            if value >= 10 * size
        ),
        f"{value:.0f}",
    )


def ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

"""Numbers as people read them: a step as one line, the state of a run as tables."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from tracegrad.events import Json
from tracegrad.store import StepRecord
from tracegrad.text_format import format_age, format_count
from tracegrad_trainer.cli.status import RunStatus
from tracegrad_trainer.metrics.points import has_gap, trained_turns
from tracegrad_trainer.utils.console import PlainTable, plain_table

# In full in the trainer's log: see `StepResult.mismatch`.
MISMATCH = " TOO LARGE: serving and training engine disagree (ranks.log)"


def format_step_line(step: StepRecord) -> str:
    """`step 7 → version 7 · reward 0.61 · 128 rollouts, 241 turns trained · gap 3.1e-06 · …`"""
    m = step.metrics
    parts = [
        f"step {step.step} → version {step.version}",
        f"reward {m.get('reward_mean', 0):.2f}",
        f"{m.get('rollouts', 0):.0f} rollouts, {trained_turns(m)} turns trained",
        f"gap {m['gap_max']:.1e}{MISMATCH if m.get('mismatch') else ''}" if has_gap(m) else "",
        format_time_shares(m.get("seconds", {})),
    ]
    return " · ".join(part for part in parts if part)


def format_time_shares(seconds: Mapping[str, float]) -> str:
    """`5.9 s (wait 81%, train 12%, push 5%)`: where the time went, largest first."""
    total = sum(seconds.values())
    if not total:
        return ""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {value / total:.0%}" for name, value in ordered)
    return f"{total:.1f} s ({text})"


def render_status(status: RunStatus) -> RenderableType:
    """`trainer status` for a terminal."""
    parts: list[RenderableType] = [_headline(status), _overview(status)]
    if status.not_trained:
        parts += [Text(), _reasons(status.not_trained)]
    if status.steps:
        parts += [Text(), _steps(status.steps)]
    return Group(*parts)


def _headline(status: RunStatus) -> Text:
    if not status.processes:
        return Text("not running; this is what the store holds", style="yellow")
    since = format_age(status.since) if status.since is not None else ""
    line = Text(f"{status.stage}", style="bold green" if status.stage == "serving" else "bold")
    return line.append(f" at {status.url}  (for {since}; {status.doing})", style="default")


def _overview(status: RunStatus) -> PlainTable:
    shown = PlainTable(header=False)
    version = "none served yet" if status.version is None else str(status.version)
    if status.failed_versions:
        version += f"  (failed pushes: {', '.join(map(str, status.failed_versions))})"
    shown.add_row("policy version", version)
    if status.push is not None and (gap := status.push["gap"]):
        sizes = f"{gap['mean']:.1e} on average, {gap['max']:.1e} at most"
        shown.add_row("gap after push", f"{sizes} (nats, served against trained)")
    shown.add_row("turns captured", str(status.turns_captured))
    shown.add_row(
        "turns trained", f"{status.turns_trained}  in {format_count(status.steps_total, 'step')}"
    )
    if status.removed:
        gone = f"{status.removed['turns']}  of {status.removed['rollouts']} rollouts (prune)"
        shown.add_row("turns removed", f"{gone}, {status.removed['trained']} of them were trained")
    for name, success in status.success.items():
        rate = f"{success['mean']:.2f} ± {success['error']:.2f}"
        shown.add_row(f"reward {name}", f"{rate}  over the last {success['rollouts']} rollouts")
    if status.seconds:
        steps = f"the last {status.seconds_steps} steps" if status.seconds_steps > 1 else "a step"
        shown.add_row("time", f"{format_time_shares(status.seconds)}  over {steps}")
    return shown


def _reasons(not_trained: Mapping[str, int]) -> PlainTable:
    # The title is a column's name: Rich would wrap it to the table's width.
    shown = plain_table("turns not trained", "")
    for reason, count in sorted(not_trained.items(), key=lambda item: -item[1]):
        shown.add_row(reason, str(count))
    return shown


# Heading, metric, format of a step's line in `trainer status`, the most important first.
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


def _steps(steps: list[Json]) -> PlainTable:
    """Columns of metrics that none of the steps has are left out."""
    shown = [one for one in _OF_STEP if any(one[1] in step["metrics"] for step in steps)]
    lines = PlainTable()
    lines.title, lines.title_justify = "last steps", "left"
    lines.padding = (0, 1, 0, 0)
    for name in ("step", *(heading for heading, _, _ in shown), "ago"):
        lines.add_column(name, justify="right")
    for step in steps:
        m = step["metrics"]
        cells = [_cell(_value(m, name), how) for _, name, how in shown]
        lines.add_row(str(step["step"]), *cells, format_age(step["created_at"]))
    return lines


def _value(metrics: Mapping[str, float], name: str) -> float | None:
    """None: it has no meaning for this step."""
    if name == "turns_trained":
        return trained_turns(metrics)
    return None if name == "gap_max" and not has_gap(metrics) else metrics.get(name)


def _cell(value: float | None, how: str) -> str:
    """Without `how`: in at most four characters."""
    if value is None:
        return "–"
    if how:
        return format(value, how)
    if value < 9999.5:
        return f"{value:.0f}"
    for size, unit in ((1e3, "k"), (1e6, "M")):
        if value < 999.5 * size:
            return f"{value / size:.{int(value < 9.95 * size)}f}{unit}"
    return f"{value / 1e9:.0f}G"

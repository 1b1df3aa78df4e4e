"""Numbers as people read them: a step as one line, the state of a run as tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from time import sleep

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tracegrad.events import Json
from tracegrad.inspect.display_text import intake_text
from tracegrad.inspect.metric_points import has_gap, trained_turns
from tracegrad.inspect.step_columns import StepColumn, columns_of
from tracegrad.store import StepRecord
from tracegrad.store.ledger.intake import DEAD_AFTER_S
from tracegrad.text_format import format_age, format_count, format_elapsed
from tracegrad_trainer.cli.status import RunStatus
from tracegrad_trainer.utils.console import (
    PlainTable,
    plain_table,
    print_json,
    print_report,
)

# Reasons of `resampling.live_prompts`, in words.
_NOT_RESAMPLED = {
    "no_request": "without a recorded request that this version reads",
    "not_chat": "without messages",
    "tools": "with tools, which need their world",
    "media": "with media, whose tokens are not known",
    "held_out": "held out",
    "turn_not_selected": "of agents or models that are not trained",
}
MOST_FAILURES = 5  # lines of errors of scorers
# In full in the trainer's log: see `StepResult.mismatch`.
MISMATCH = " TOO LARGE: serving and training engine disagree (ranks.log)"


def format_step_line(step: StepRecord) -> str:
    """`step 7 → version 7 · reward 0.61 · 128 rollouts, 241 turns trained · gap 3.1e-06 · …`"""
    m = step.metrics
    parts = [
        f"step {step.step} → version {step.version}",
        f"reward {m.get('reward_mean', 0):.2f}",
        f"{m.get('rollouts', 0):.0f} rollouts, {trained_turns(m)} turns trained",
        format_share(m),
        _format_gap(m),
        format_time_shares(m.get("seconds", {})),
    ]
    return " · ".join(part for part in parts if part)


def _format_gap(metrics: Mapping[str, float]) -> str:
    """The mean: in bfloat16 the largest of thousands of tokens is large without a fault."""
    if not has_gap(metrics):
        return ""
    mean = metrics.get("gap_mean", metrics["gap_max"])
    return f"gap {mean:.1e}{MISMATCH if metrics.get('mismatch') else ''}"


def format_share(metrics: Mapping[str, float]) -> str:
    """`1 of 8 groups with a signal: 0.12 of a step`; nothing of a whole step."""
    share = metrics.get("step_share", 1.0)
    if share == 1:
        return ""
    trained = metrics.get("groups_trained", 0)
    return f"{trained:.0f} of {trained / share:.0f} groups with a signal: {share:.2g} of a step"


def format_time_shares(seconds: Mapping[str, float]) -> str:
    """`5.9 s (wait 81%, train 12%, push 5%)`: where the time went, largest first."""
    total = sum(seconds.values())
    if not total:
        return ""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {value / total:.0%}" for name, value in ordered)
    return f"{total:.1f} s ({text})"


def print_status(status: RunStatus, console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(status.as_json())
    else:
        print_report(render_status(status), console)


def watch_status(
    read: Callable[[], RunStatus], console: Console, *, as_json: bool, every_s: float = 1.0
) -> None:
    """Until Ctrl-C: on a terminal in place, else one below the other."""
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not console.is_terminal:
            while True:
                print_status(read(), console, as_json=as_json)
                sleep(every_s)
        with Live(render_status(read()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(every_s)
                live.update(render_status(read()), refresh=True)


def render_status(status: RunStatus) -> RenderableType:
    """`trainer status` for a terminal."""
    parts: list[RenderableType] = [_headline(status), _overview(status)]
    if status.not_trained:
        parts += [Text(), _reasons(status.not_trained)]
    if status.steps:
        parts += [Text(), _steps(status.steps), Text(), _legend(status.steps)]
    return Group(*parts)


def _headline(status: RunStatus) -> Text:
    if status.stage == "stopped":
        return _ended(status)
    since = format_age(status.since) if status.since is not None else ""
    doing = status.doing
    if status.doing_since is not None:
        doing += f" for {format_age(status.doing_since)}"
    line = Text(f"{status.stage}", style="bold green" if status.stage == "serving" else "bold")
    where = f" at {status.url}" if status.url else ""
    return line.append(f"{where}  (for {since}; {doing})", style="default")


def _ended(status: RunStatus) -> Text:
    """How the last run ended."""
    run = status.last_run
    if run is None:
        return Text("not running; this is what the store holds", style="yellow")
    if run["ending"] is None:
        assert status.last_seen is not None
        seen = format_age(status.last_seen)
        return Text(
            f"not running; {run['command']} ended without a word (killed by SIGKILL, out of memory,"
            f" or the machine went down); last seen {seen} ago",
            style="red",
        )
    step = "" if run["at_step"] is None else f" at step {run['at_step']}"
    how = "failed" if run["ending"] == "error" else "ended"
    return Text(
        f"not running; {run['command']} {how} {format_age(run['ended_at'])} ago{step}:"
        f" {run['detail']}",
        style="red" if how == "failed" else "yellow",
    )


def _overview(status: RunStatus) -> PlainTable:
    shown = PlainTable(header=False)
    if status.begins is not None:
        shown.add_row("this run", status.begins)
    if status.paused is not None:
        ago, by = format_age(status.paused["created_at"]), status.paused["by"]
        shown.add_row("paused", f"{ago} ago by {by}: {status.paused['reason']} (trainer resume)")
    elif status.held is not None:
        shown.add_row("held", status.held)
    if status.refused is not None:
        one = status.refused
        ago = format_age(one["created_at"])
        shown.add_row("refused", f"{ago} ago: {one['kind']} by {one['by']}: {one['why']}")
    if status.waiting_for is not None:
        running = status.stage != "stopped"
        shown.add_row("waiting" if running else "next batch", status.waiting_for)
    for line in status.unmatched:
        shown.add_row("selection", line)
    if status.placement is not None:
        shown.add_row("placement", status.placement.removeprefix("placement: "))
    for name, part in status.parts.items():
        times = format_count(part["restarts"], "time")
        now = "" if part["up"] else "; not ready yet"
        ago = f"last {format_age(part['last_end_at'])} ago{now}: {part['last_end']}"
        shown.add_row("started again", f"{name}, {times}, {ago}")
    if status.absent_workers:
        names = ", ".join(status.absent_workers)
        shown.add_row("not at work", f"{names}: nobody has started them (trainer workers)")
    version = "none served yet" if status.version is None else str(status.version)
    if status.failed_versions:
        version += f"  (failed pushes: {', '.join(map(str, status.failed_versions))})"
    shown.add_row("policy version", version)
    if status.push is not None and status.push["paused_s"] is not None:
        took, paused = status.push["seconds"], status.push["paused_s"]
        held = status.push["held_s"]
        waited = "" if held is None else f"; new calls waited {held:.2f} s"
        shown.add_row("last push", f"{took:.2f} s, of it {paused:.2f} s without a token{waited}")
    if status.push is not None and (gap := status.push["gap"]):
        sizes = f"{gap['mean']:.1e} on average, {gap['max']:.1e} at most"
        shown.add_row("gap after push", f"{sizes} (nats, served against trained){_bounds(gap)}")
    shown.add_row("turns captured", str(status.turns_captured))
    shown.add_row(
        "turns trained", f"{status.turns_trained}  in {format_count(status.steps_total, 'step')}"
    )
    if status.pending_steps:
        first, last = status.pending_steps[0], status.pending_steps[-1]
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        what = "made, and waiting for a checkpoint"
        if status.stage == "stopped":
            what = "lost with the run; the next one trains their turns again"
        shown.add_row("not committed", f"{which}: {what}")
    if status.late_rewards:
        late = status.late_rewards
        count, rollouts = late["rewards"], format_count(late["rollouts"], "rollout")
        came = f"for {rollouts}, of the last {late['of']}: came after training, not used"
        shown.add_row("late rewards", f"{count}  {came}")
    for name, counts in status.scorings.items():
        shown.add_row(f"scored by {name}", _scorings(counts))
    for failure in status.scoring_failures[:MOST_FAILURES]:
        rollouts = format_count(failure["rollouts"], "rollout")
        shown.add_row("not scored", f"{rollouts}: {failure['error']}")
    if status.removed:
        gone = f"{status.removed['turns']}  of {status.removed['rollouts']} rollouts (prune)"
        shown.add_row("turns removed", f"{gone}, {status.removed['trained']} of them were trained")
    for name, success in status.success.items():
        rate = f"{success['mean']:.2f} ± {success['error']:.2f}"
        shown.add_row(f"reward {name}", f"{rate}  over the last {success['rollouts']} rollouts")
    if status.seconds:
        steps = f"the last {status.seconds_steps} steps" if status.seconds_steps > 1 else "a step"
        shown.add_row("time", f"{format_time_shares(status.seconds)}  over {steps}")
    if status.lags:
        shown.add_row("tokens by lag", format_lags(status.lags, status.dropped))
    if status.intake is not None:
        shown.add_row("drivers", _drivers(status.intake))
    if status.resampled is not None:
        shown.add_row("live prompts", _resampled(status.resampled))
    if status.evaluator is not None:
        shown.add_row("tasks of the gate", _evaluator(status.evaluator))
    if status.damaged_records:
        lines = format_count(status.damaged_records, "line")
        shown.add_row("damaged", f"{lines} of run/journal.jsonl: passed over")
    return shown


def format_lags(lags: Mapping[str, float], dropped: Mapping[str, float]) -> str:
    """`0: 41%, 1: 58%, 2: 1%; of all turns 0.5% were too old to be trained, 20% over-sampled`"""
    shares = ", ".join(f"{lag}: {share:.0%}" for lag, share in lags.items())
    stale, cut = (100 * dropped.get(why, 0.0) for why in ("stale", "over_sampled"))
    also = f", {cut:.3g}% over-sampled" if cut else ""
    return f"{shares}; of all turns {stale:.3g}% were too old to be trained{also}"


def describe_unusable(reasons: Mapping[str, int]) -> str:
    """`3 with tools, which need their world; 1 held out`"""
    some = [(count, _NOT_RESAMPLED[why]) for why, count in reasons.items() if why in _NOT_RESAMPLED]
    return "; ".join(f"{count} {meaning}" for count, meaning in sorted(some, reverse=True))


def _resampled(found: Json) -> str:
    """What was sampled again since the worker's start, and what could not be."""
    rollouts = format_count(found["rollouts"], "rollout")
    said = f"{found['prompts']} sampled again as {rollouts}"
    if found["failed"]:
        said += f", of which {found['failed']} failed"
    if found["unusable"]:
        said += f"; not again: {describe_unusable(found['unusable'])}"
    return said


def _evaluator(found: Json) -> str:
    """`run against version 7; 4 runs of the tasks`"""
    version = found["version"]
    said = "nothing to evaluate" if version is None else f"run against version {version}"
    said += f"; {format_count(found['passes'], 'run')} of the tasks"
    return f"{said}; {found['failed']} failed: {found['error']}" if found["failed"] else said


def _drivers(intake: Json) -> str:
    """Whether they wait, for what, and how long they have."""
    now = intake_text(
        paced=intake["paced"],
        rollouts=intake["rollouts"],
        reason=intake["reason"],
        silent_for_s=intake["silent_for_s"],
    )
    is_paced = intake["paced"] and intake["silent_for_s"] <= DEAD_AFTER_S
    if not (is_paced and intake["places"]):
        return now
    waited = f"waited {format_elapsed(intake['waited_s'])}"
    return f"{now}; {waited} in all for {format_count(intake['places'], 'rollout')}"


def _scorings(counts: Json) -> str:
    made = counts["scored"] + counts["unknown"] + counts["failed"]
    said = [str(counts["scored"])]
    said += [f"{counts['unknown']} unknown"] if counts["unknown"] else []
    said += [f"{counts['failed']} failed"] if counts["failed"] else []
    return f"{', '.join(said)}; {counts['seconds'] / made:.2g} s each"


def _reasons(not_trained: Mapping[str, int]) -> PlainTable:
    # The title is a column's name: Rich would wrap it to the table's width.
    shown = plain_table("turns not trained", "")
    for reason, count in sorted(not_trained.items(), key=lambda item: -item[1]):
        shown.add_row(reason, str(count))
    return shown


def _bounds(gap: Json) -> str:
    """What it was held against, of pushes that say it."""
    allowed = gap.get("allowed")
    if allowed is None:
        return ""
    return (
        f", bounds of {allowed}" if isinstance(allowed, str) else f", at most {allowed:g} allowed"
    )


def _steps(steps: list[Json]) -> PlainTable:
    shown = _columns_of(steps)
    lines = PlainTable()
    lines.title, lines.title_justify = "last steps", "left"
    lines.padding = (0, 1, 0, 0)
    for name in ("step", *(column.heading for column in shown), "ago"):
        lines.add_column(name, justify="right")
    for step in steps:
        cells = [column.cell(step["metrics"]) for column in shown]
        lines.add_row(str(step["step"]), *cells, format_age(step["created_at"]))
    return lines


def _columns_of(steps: list[Json]) -> list[StepColumn]:
    return columns_of([step["metrics"] for step in steps])


def _legend(steps: list[Json]) -> PlainTable:
    """What the headings of `_steps` stand for."""
    lines = PlainTable(header=False)
    for column in _columns_of(steps):
        if column.meaning is not None:
            lines.add_row(column.heading, column.meaning, style="dim")
    return lines

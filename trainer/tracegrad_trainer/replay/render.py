"""A replay as people read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from tracegrad.inspect.metric_points import has_gap, trained_turns
from tracegrad.inspect.step_metrics import find_metric
from tracegrad.text_format import format_age, format_count
from tracegrad_trainer.replay.load import ReplayCandidate
from tracegrad_trainer.replay.replay import ReplayResult, advantage_std, by_gradient_share
from tracegrad_trainer.utils.console import PlainTable, plain_table

# What is looked at first, in this order; the rest only where it differs.
MAIN_METRICS = (
    *("loss", "policy_loss", "kl_loss", "value_loss", "grad_norm", "entropy", "kl_reference"),
    *("k1", "k3", "ess", "max_w", "gap_max"),
    *("clipped_share", "clipped_turn_share", "corrected_turn_share"),
    *("tokens_trained", "turns_trained", "rows_dropped", "lr"),
)
# Terms of the loss that most objectives do not have.
ONLY_IF_USED = ("policy_loss", "kl_loss", "value_loss", "rows_dropped")
ID_LENGTH = 12  # shown of a rollout's id, or as much as is unique in the batch
DIFFERENT = "bold red"


def render_replay(replay: ReplayResult, *, turns: int | None = None) -> RenderableType:
    """`turns`: how many of them to show; with other settings those that change most."""
    parts: list[RenderableType] = [_what(replay), Text(), _metrics(replay), _verdict(replay)]
    if replay.other is not None:
        parts += [Text(), _changes(replay, turns or 8)]
        parts += _fates(replay.replayed.skipped, replay.other.skipped)
    elif turns:
        parts += [Text(), _turns(replay, turns), _go_on()]
    return Group(*parts)


def render_candidates(candidates: Sequence[ReplayCandidate]) -> RenderableType:
    shown = plain_table("step", "version", "ago", "turns", "loss", "replay", words=["replay"])
    for one in candidates:
        step, m = one.step, one.step.metrics
        shown.add_row(
            str(step.step),
            str(step.version),
            format_age(step.created_at),
            str(trained_turns(m)),
            f"{m.get('loss', 0.0):.4g}",
            Text("yes", style="green") if one.problem is None else Text(f"no: {one.problem}"),
        )
    return shown


def format_float32(value: float | None) -> str:
    """Nine digits: as many as distinguish two float32 numbers."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.9g}"


def unique_prefixes(ids: Sequence[str]) -> dict[str, str]:
    """Beginnings of ids that are clear among them, which `tracegrad rollouts show` takes."""
    length = ID_LENGTH
    while len({name[:length] for name in ids}) < len(set(ids)):
        length += 1
    return {name: name[:length] for name in ids}


def _what(replay: ReplayResult) -> PlainTable:
    recorded, step = replay.recorded, replay.recorded.step
    shown = PlainTable(header=False)
    ranks, threads = recorded.batch.ranks, recorded.batch.threads
    layout = f"{format_count(ranks, 'rank')} of {format_count(threads, 'thread')}"
    shown.add_row(
        f"step {step.step}",
        f"version {recorded.batch.version} → {step.version}, {format_age(step.created_at)} ago;"
        f" replayed on {layout} in {replay.replayed.seconds:.1f} s",
    )
    not_trained = Counter(replay.replayed.skipped.values())
    reasons = ", ".join(f"{count} {why}" for why, count in not_trained.most_common())
    shown.add_row(
        "batch",
        f"{format_count(len(recorded.groups), 'group')},"
        f" {format_count(len(recorded.rollouts), 'rollout')},"
        f" {format_count(len(recorded.trained), 'turn')} trained"
        + (f", {not_trained.total()} not: {reasons}" if reasons else ""),
    )
    folder = recorded.checkpoint
    weights = "the model folder's" if folder is None else _from_here(folder)
    if recorded.since:
        numbers = ", ".join(str(one.step.step) for one in recorded.since)
        weights += f", and step{'s' * (len(recorded.since) > 1)} {numbers} trained again"
    shown.add_row("weights", weights)
    return shown


def _from_here(folder: Path) -> str:
    """As it would be typed."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _metrics(replay: ReplayResult) -> PlainTable:
    compared, differing = replay.compared, set(replay.differing)
    other = replay.other
    lines = PlainTable()
    lines.add_column("")
    names = ["recorded", "", "replayed", *([replay.other_name] if other else ["unit"])]
    for name in names:
        lines.add_column(name, justify="left" if name in ("", "unit") else "right")
    known_to = compared.keys() | (other.metrics.keys() if other else set())
    shown = [name for name in MAIN_METRICS if name in known_to and _is_of_use(name, replay)]
    shown += sorted(differing & compared.keys() - set(shown))
    for name in shown:
        before, now = compared.get(name, (None, replay.replayed.metrics.get(name)))
        differs = name in differing
        style, shown_as = (DIFFERENT, _exact) if differs else ("", format_float32)
        cells = [
            Text(name, style=style),
            Text(shown_as(before), style=style),
            Text("≠" if differs else "=" if name in compared else "", style=style),
            Text(shown_as(now), style=style),
        ]
        if other is None:
            known = find_metric(name)
            cells.append(Text(known.unit if known else "", style="dim"))
        else:
            cells.append(_beside(other.metrics.get(name), now))
        lines.add_row(*cells)
    if other is not None:
        mine, theirs = advantage_std(replay.replayed.turns), advantage_std(other.turns)
        cells = [Text("advantage_std"), Text("–"), Text(""), Text(format_float32(mine))]
        lines.add_row(*cells, _beside(theirs, mine))
    return lines


def _is_of_use(name: str, replay: ReplayResult) -> bool:
    runs = [ran.metrics for ran in (replay.replayed, replay.other) if ran is not None]
    if name == "policy_loss":  # the loss itself, where it has no other term
        return any(m.get(name) != m.get("loss") for m in runs)
    if name == "gap_max":
        return any(map(has_gap, runs))
    return name not in ONLY_IF_USED or any(m.get(name) for m in runs)


def _exact(value: float | None) -> str:
    return "–" if value is None else repr(float(value))


def _beside(value: float | None, reference: float | None) -> Text:
    return Text(format_float32(value), style="" if value == reference else "cyan")


def _verdict(replay: ReplayResult) -> Text:
    total, differing = len(replay.compared), len(replay.differing)
    if replay.equal:
        return Text(f"reproduced: all {total} numbers are equal to the last bit", style="green")
    text = Text(f"different: {differing} of {total} numbers are not equal", style=DIFFERENT)
    if replay.recorded.batch.dropped_rows != replay.replayed.dropped_rows:
        text.append(
            f"\nrows that were not finite: {replay.recorded.batch.dropped_rows} recorded,"
            f" {replay.replayed.dropped_rows} replayed"
        )
    return text.append(f"\n{_cause(replay.recorded.batch.torch)}", style="not bold default")


def _cause(torch: str | None) -> str:
    here = version("torch")
    if torch is not None and torch != here:
        return (
            f"The step was made with torch {torch}, this is torch {here}: it may round otherwise."
        )
    return (
        "Other weights (--checkpoint), another machine, or another version of this program does"
        " that."
    )


def _turns(replay: ReplayResult, most: int) -> PlainTable:
    turns = replay.replayed.turns
    ids = unique_prefixes([rollout.rollout_id for rollout in replay.recorded.rollouts])
    title = (
        f"the {min(most, len(turns))} of {len(turns)} turns with the largest share of the gradient"
    )
    shown = plain_table(
        "rollout", "turn", "tokens", "adv.", "loss", "gradient", "ratio", "clip", "lag"
    )
    shown.title, shown.title_justify = title, "left"
    for turn in by_gradient_share(turns)[:most]:
        shown.add_row(
            ids[turn.rollout_id],
            str(turn.index),
            str(turn.tokens),
            f"{turn.advantage:+.3f}",
            f"{turn.loss:+.2e}",
            _share(turn.gradient_share),
            f"{turn.ratio:.3f}",
            f"{turn.clipped:.0%}",
            f"{turn.staleness:g}",
        )
    return shown


def _changes(replay: ReplayResult, most: int) -> PlainTable:
    """Turns side by side, those whose share of the gradient changes most first."""
    assert replay.other is not None
    before = {turn.turn_id: turn for turn in replay.replayed.turns}
    after = {turn.turn_id: turn for turn in replay.other.turns}
    ids = unique_prefixes([rollout.rollout_id for rollout in replay.recorded.rollouts])

    def change(turn_id: str) -> float:
        return sum(
            one[turn_id].gradient_share * sign
            for one, sign in ((after, 1), (before, -1))
            if turn_id in one
        )

    ordered = sorted(before.keys() | after.keys(), key=lambda t: (-abs(change(t)), t))
    count = f"{min(most, len(ordered))} of {len(ordered)}"
    title = f"the {count} turns whose share of the gradient changes most"
    shown = plain_table("rollout", "turn", "tokens", "adv.", "→", "gradient", "→", "change")
    shown.title, shown.title_justify = title, "left"
    for turn_id in ordered[:most]:
        a, b = before.get(turn_id), after.get(turn_id)
        one = a or b
        assert one is not None
        shown.add_row(
            ids[one.rollout_id],
            str(one.index),
            str(one.tokens),
            f"{a.advantage:+.3f}" if a else "–",
            f"{b.advantage:+.3f}" if b else "–",
            _share(a.gradient_share) if a else Text("–"),
            _share(b.gradient_share) if b else Text("–"),
            f"{change(turn_id) * 100:+.2f} %",
        )
    return shown


def _fates(before: Mapping[str, str], after: Mapping[str, str]) -> list[Text]:
    """What the other settings would train besides, and what they would not."""
    lines = []
    if more := before.keys() - after.keys():
        lines.append(f"{format_count(len(more), 'turn')} more would be trained")
    if lost := Counter(after[turn_id] for turn_id in after.keys() - before.keys()):
        reasons = ", ".join(f"{count} {why}" for why, count in lost.most_common())
        lines.append(f"{format_count(lost.total(), 'turn')} would not be trained: {reasons}")
    return [Text("; ".join(lines), style="cyan")] if lines else []


def _go_on() -> Text:
    return Text("tracegrad rollouts show ROLLOUT --turn TURN shows what a turn said", style="dim")


def _share(value: float) -> Text:
    return Text(f"{value * 100:+.2f} %", style="green" if value > 0 else "red" if value < 0 else "")

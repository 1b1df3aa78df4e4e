"""`tracegrad rollouts show`: one rollout as a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from tracegrad.cli.render.console import hanging, rule
from tracegrad.cli.render.rollout_list import outcome_text, task_text
from tracegrad.cli.render.spans import render_spans
from tracegrad.cli.render.turn import TurnView, render_full_turn, render_turn, reward_text
from tracegrad.inspect.display_text import (
    clip,
    format_number,
    one_line,
    printable,
    tag_text,
    training_text,
)
from tracegrad.inspect.reasons import (
    describe_idle,
    rollout_reason,
    untrained_reason,
    untrained_text,
)
from tracegrad.inspect.transcript import Transcript
from tracegrad.inspect.tree_layout import children_of
from tracegrad.inspect.turn_standing import RewardStandings
from tracegrad.jsonutil import text_or_json
from tracegrad.store import RolloutDetail
from tracegrad.store.read.task_titles import input_text
from tracegrad.text_format import format_count, format_duration, format_time

_COLUMN = 10


def render_rollout(
    detail: RolloutDetail, width: int | None, *, tokens: bool, full: bool
) -> Iterator[Text]:
    standings = RewardStandings(detail)
    how = TurnView(
        detail,
        Transcript(detail.turns),
        standings,
        width,
        full=full,
        tokens=tokens,
        of_rollout=rollout_reason(detail),
    )
    yield from _header(detail, width)
    for index in range(len(detail.turns)):
        yield Text()
        yield from render_turn(index, how)
    if detail.spans:
        yield Text()
        yield rule(Text("spans", style="bold"), width)
        yield from render_spans(detail, width, full=full)


def render_one_turn(
    detail: RolloutDetail, index: int, width: int | None, *, tokens: bool
) -> Iterator[Text]:
    """One turn, whole."""
    standings = RewardStandings(detail)
    how = TurnView(detail, Transcript(detail.turns), standings, width, full=True, tokens=tokens)
    yield rollout_title(detail, width)
    yield Text()
    yield from render_full_turn(index, how)


def rollout_title(detail: RolloutDetail, width: int | None) -> Text:
    """The rollout in one line."""
    row = detail.summary
    line = Text.assemble(("rollout ", "dim"), (one_line(row.rollout_id), "bold cyan"))
    task = task_text(row.task_id, input_text(detail.task))
    for part in (task, outcome_text(row)):
        line.append(" · ").append_text(part)
    if row.reward is not None:
        line.append(" · ").append(f"reward {format_number(row.reward)}", style="bold")
    if width is not None:
        line.truncate(width, overflow="ellipsis")
    return line


def _header(detail: RolloutDetail, width: int | None) -> Iterator[Text]:
    for label, body in _rows(detail):
        yield from hanging(Text(label, style="dim"), body, column=_COLUMN, width=width)


def _rows(detail: RolloutDetail) -> Iterator[tuple[str, Text]]:
    row = detail.summary
    yield "rollout", Text(one_line(row.rollout_id), style="bold cyan")
    yield "task", Text(one_line(row.task_id or "untitled"))
    if detail.task is not None:
        asked = printable(text_or_json(detail.task))
        yield "asked", Text(clip(asked, lines=16, characters=1200))
    if row.agent:
        yield "agent", Text(one_line(row.agent))
    if row.tags:
        yield "tags", Text(tag_text(row.tags))
    if row.held_out:
        yield "held out", Text("for evaluation: never trained")
    yield "outcome", _outcome(detail)
    if row.continues:
        yield "continues", Text(one_line(row.continues), style="cyan")
    if row.error:
        yield "error", Text(printable(row.error), style="red")
    yield from _rewards(detail)
    yield "turns", Text(_shape(detail))
    yield from _training(detail)


def _outcome(detail: RolloutDetail) -> Text:
    row = detail.summary
    text, idle = outcome_text(row), describe_idle(row, detail.trainer_idle_s)
    if row.outcome is None or row.finished_at is None:
        open_ = Text.assemble(text, f" since {format_time(row.opened_at)}")
        return open_.append(f", {idle}") if idle else open_
    took = format_duration(max(0.0, row.finished_at - row.opened_at))
    line = Text.assemble(text, f" in {took}, opened {format_time(row.opened_at)}")
    return line.append(f", {idle}") if idle else line


def _rewards(detail: RolloutDetail) -> Iterator[tuple[str, Text]]:
    """Those of the whole rollout; a turn's stand with the turn."""
    standings = RewardStandings(detail)
    whole = standings.of_turn(None)
    for reward in whole:
        text = reward_text(reward, detail, standings)
        if reward.turn is not None:
            text.append(f"  for turn {reward.turn}, which is not there", style="not strike red")
        yield "reward", text
    if beside := len(detail.rewards) - len(whole):
        yield "", Text(f"{format_count(beside, 'reward')} for turns, with them below", style="dim")


def _shape(detail: RolloutDetail) -> str:
    turns = detail.turns
    if not turns:
        return "none" + (f", {format_count(len(detail.spans), 'span')}" if detail.spans else "")
    children = children_of(turns)
    leaves = sum(not children[index] for index in range(len(turns)))
    sent = sum(len(turn.prompt_token_ids) for turn in turns)
    sampled = sum(len(turn.completion_token_ids) for turn in turns)
    paths = f" on {format_count(leaves, 'path')}" if leaves > 1 else ""
    forks = sum(turn.fork_reason is not None for turn in turns)
    tokens = (
        f"{sent:,} prompt + {format_count(sampled, 'token')} sampled" if sent else "without tokens"
    )
    forked = f", {format_count(forks, 'fork')}" if forks else ""
    return f"{len(turns):,}{paths}, {tokens}{forked}"


def _training(detail: RolloutDetail) -> Iterator[tuple[str, Text]]:
    """How many turns were trained, and how many not, by reason. What is the whole rollout's is said
    here with its meaning, and not of each turn."""
    row, of_rollout = detail.summary, rollout_reason(detail)
    meaning = untrained_text(of_rollout).meaning if of_rollout is not None else ""
    missing = (untrained_reason(turn, detail) for turn in detail.turns)
    reasons = Counter(each.reason for each in missing if each is not None)
    each = ", ".join(f"{amount} {one_line(reason)}" for reason, amount in reasons.most_common())
    state = training_text(row)
    if row.trained_turns:
        turns = f"{row.trained_turns} of {format_count(row.turns, 'turn')}"
        why = f", {reasons.total()} not: {each}" if each else ""
        state = f"{turns} trained in step {row.consumed_step}{why}"
    elif reasons.keys() <= {of_rollout} and of_rollout == state:
        yield "training", Text.assemble(state, (f": {meaning}", "dim"))
        return
    elif reasons:
        state = each if state in reasons else f"{state}: {each}"
    yield "training", Text(state)
    if of_rollout is not None:
        yield "", Text(f"{one_line(of_rollout)}: {meaning}", style="dim")

"""`tracegrad rollouts time`: where the seconds went, of one rollout and of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from tracegrad.cli.render.console import hanging, indented, rule
from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.inspect.display_text import one_line
from tracegrad.inspect.rollout_time import (
    STAGES,
    RolloutTime,
    StageStatistics,
    TurnTime,
    stage_statistics,
)
from tracegrad.text_format import format_count, format_duration

_LEAST_S = 0.0005  # what is less is shown as 0
_OF_TURNS = ("proxy", "gate", "queue", "engine_queue", "prefill", "decode", "inference", "commit")
_DROPPED = {"proxy": 2, "commit": 1}  # where a terminal is narrow
_UNKNOWN = Text("?", style="yellow")


def render_time(time: RolloutTime, title: Text, width: int | None) -> Iterator[Text]:
    yield title
    yield Text()
    if time.turns:
        yield from render_table(_turn_columns(time), range(len(time.turns)), width)
        yield Text()
    yield from render_table(_stage_columns(time), list(time.stages), width)
    yield Text()
    yield Text(f"{_seconds(time.whole_s)} in all", style="bold")
    for line in _remarks(time):
        yield from indented(Text(line, style="dim"), margin=0, width=width)


def _turn_columns(time: RolloutTime) -> list[TableColumn[int]]:
    turns = time.turns
    there = [stage for stage in _OF_TURNS if any(stage in turn.seconds for turn in turns)]
    columns: list[TableColumn[int]] = [
        TableColumn("turn", lambda row: Text(str(row))),
        TableColumn("at", lambda row: Text(f"+{_seconds(turns[row].begins_s)}"), "right"),
    ]
    columns += [_turn_column(turns, stage) for stage in there]
    if any(turn.held_s for turn in turns):
        columns.append(TableColumn("held", lambda row: _cell(turns[row].held_s), "right"))
    columns.append(TableColumn("whole", lambda row: _whole(turns[row]), "right"))
    return columns


def _turn_column(turns: Sequence[TurnTime], stage: str) -> TableColumn[int]:
    def cell(row: int) -> Text:
        seconds = turns[row].seconds
        if stage in seconds:
            return _cell(seconds[stage])
        # What a call never came to it did not take; that it took nobody knows how long is said.
        hidden = stage == "commit" or (stage == "engine_queue" and turns[row].hides_engine_queue)
        return _UNKNOWN if hidden or not seconds else Text("-", style="dim")

    return TableColumn(_label(stage), cell, "right", drop_order=_DROPPED.get(stage, 0))


def _whole(turn: TurnTime) -> Text:
    return _cell(turn.ends_s - turn.begins_s) if turn.is_known else _UNKNOWN


def _stage_columns(time: RolloutTime) -> list[TableColumn[str]]:
    whole = time.whole_s or 1.0
    return [
        TableColumn("stage", _stage),
        TableColumn("time", lambda stage: _cell(time.stages[stage]), "right"),
        TableColumn("share", lambda stage: _share(time.stages[stage] / whole), "right"),
        _what_column(lambda stage: stage),
    ]


def _what_column(stage_of: Any) -> TableColumn[Any]:
    return TableColumn(
        "",
        lambda row: Text(STAGES[stage_of(row)], style="dim"),
        min_width=12,
        drop_order=1,
    )


def _remarks(time: RolloutTime) -> Iterator[str]:
    if time.overlap_s >= _LEAST_S:
        yield (
            f"calls overlapped for {_seconds(time.overlap_s)}: a moment of several is shared by"
            " them, and counted once"
        )
    if untimed := sum(not turn.is_known for turn in time.turns):
        yield f"{format_count(untimed, 'turn')} without timing: what is around them is unknown"
    if missing := sum(turn.is_known and not turn.commit_is_known for turn in time.turns):
        yield (
            f"the commit of {format_count(missing, 'turn')} is not known: the rollout's next turn"
            " would say it; it is in what follows"
        )
    if hidden := sum(turn.hides_engine_queue for turn in time.turns):
        yield (
            f"the engine did not say how long {format_count(hidden, 'turn')} waited in its queue:"
            " it is in their prefill or inference"
        )
    if held := sum(turn.held_s for turn in time.turns):
        yield f"weights were pushed in {_seconds(held)} of the engine's time (held)"


def time_json(time: RolloutTime) -> dict[str, Any]:
    return {
        "rollout_id": time.rollout_id,
        "began_at": time.began_at,
        "whole_s": time.whole_s,
        "stages": dict(time.stages),
        "overlap_s": time.overlap_s,
        "turns": [
            {
                "turn": index,
                "turn_id": turn.turn_id,
                "begins_s": turn.begins_s,
                "ends_s": turn.ends_s,
                "seconds": dict(turn.seconds) or None,
                "held_s": turn.held_s,
            }
            for index, turn in enumerate(time.turns)
        ],
    }


def render_times(times: Sequence[RolloutTime], width: int | None, *, more: bool) -> Iterator[Text]:
    """`more`: there are older rollouts than these."""
    whole = sum(time.whole_s for time in times)
    yield Text(
        f"{'the newest ' if more else ''}{format_count(len(times), 'rollout')},"
        f" {_seconds(whole)} in all, {_seconds(whole / len(times))} each",
        style="bold",
    )
    yield Text()
    columns: list[TableColumn[StageStatistics]] = [
        TableColumn("stage", lambda row: _stage(row.stage)),
        TableColumn("share", lambda row: _share(row.share), "right"),
        TableColumn("mean", lambda row: _cell(row.mean_s), "right"),
        TableColumn("p95", lambda row: _cell(row.p95_s), "right"),
        TableColumn("rollouts", lambda row: Text(f"{row.rollouts:,}"), "right"),
        _what_column(lambda row: row.stage),
    ]
    yield from render_table(columns, stage_statistics(times), width)
    slowest = sorted(times, key=lambda time: -time.whole_s)[:3]
    yield Text()
    yield rule(Text("the slowest", style="bold"), width)
    for time in slowest:
        most = sorted(time.stages.items(), key=lambda pair: -pair[1])[:2]
        parts = ", ".join(f"{_label(stage)} {_seconds(seconds)}" for stage, seconds in most)
        line = Text(f"{_seconds(time.whole_s)}: {parts}")
        name = Text(one_line(time.rollout_id), style="cyan")
        yield from hanging(name, line, column=4, width=width, margin=2)


def times_json(times: Sequence[RolloutTime]) -> dict[str, Any]:
    return {
        "rollouts": len(times),
        "whole_s": sum(time.whole_s for time in times),
        "stages": {
            row.stage: {
                "share": row.share,
                "mean_s": row.mean_s,
                "p95_s": row.p95_s,
                "rollouts": row.rollouts,
            }
            for row in stage_statistics(times)
        },
    }


def _stage(stage: str) -> Text:
    return Text(_label(stage), style="yellow" if stage == "unknown" else "")


def _label(stage: str) -> str:
    return stage.replace("_", " ")


def _cell(seconds: float) -> Text:
    return Text(_seconds(seconds), style="" if seconds >= _LEAST_S else "dim")


def _seconds(seconds: float) -> str:
    return format_duration(seconds) if seconds >= _LEAST_S else "0"


def _share(share: float) -> Text:
    return Text(f"{share:.1%}", style="" if share >= 0.0005 else "dim")

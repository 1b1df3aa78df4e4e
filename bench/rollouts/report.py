"""The run as a page of Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from bench.rollouts.local import Many
from bench.rollouts.schedules import Measured
from bench.rollouts.workload import (
    FASTEST_S,
    MEDIAN_S,
    REPLY_S,
    SLOTS,
    SLOWEST_S,
    TURNS,
)
from bench.tables import Goal, goal_table, markdown, number
from tracegrad.events import Outcome

RUNNER, BARRIER = "this runner", "gather of each batch"
_INTRODUCTION = """\
# Rollouts a minute

Written by `make bench-rollouts`; do not edit. The engine and the environments are scripted, so
that only the schedule differs: a rollout has {turns[0]} to {turns[1]} turns, each a reply of
{reply} s by one of the engine's {slots} slots and a step of the environment of {fastest} to
{slowest} s (lognormal, median {median} s). All schedules have {concurrency} rollouts at once. The
clock runs {faster:.0f} times as fast: a second of the workload is {scale:g} s here, and rates are
in minutes of the workload. {cores} cores, load {load:.1f} when it began, {machine}, {day}.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """`rounds`: each schedule's of each round, by name. `single`, `many`: local processes."""

    rounds: Sequence[Mapping[str, Measured]]
    concurrency: int
    scale: float
    load: float
    single: Many
    many: Many
    many_at_once: int


def ratio(found: Found) -> float:
    """Of this runner to the barrier, the median of the rounds' own."""
    return median(each[RUNNER].per_minute / each[BARRIER].per_minute for each in found.rounds)


def growth(many: Many) -> float:
    """Of the runner's memory from the second fifth of its rollouts to the last, in MiB."""
    fifth = len(many.rss_mib) // 5
    return median(many.rss_mib[-fifth:]) - median(many.rss_mib[fifth : 2 * fifth])


def goals(found: Found) -> list[Goal]:
    rise, single = ratio(found), [each.overhead_s * 1000 for each in found.single.ended_]
    p50, errors = median(single), _errors(found.many)
    most, grown = found.many.most_at_once, growth(found.many)
    return [
        Goal(
            "rollouts a minute, against a barrier of each batch",
            "at least 2.5 times",
            f"{rise:.1f} times",
            rise >= 2.5,
        ),
        Goal(
            "a local rollout beside its agent's own time, median",
            "below 50 ms",
            f"{p50:.0f} ms",
            p50 < 50,
        ),
        Goal(
            f"{found.many_at_once} local rollouts at once, {len(found.many.ended_):,} in all",
            "no error",
            f"{errors} errors, {most} at once",
            errors == 0 and most >= found.many_at_once,
        ),
        Goal(
            "growth of the runner's memory over these",
            "below 5 MiB",
            f"{grown:+.1f} MiB",
            grown < 5,
        ),
    ]


def _errors(many: Many) -> int:
    return sum(
        count for outcome, count in many.outcomes.items() if outcome is not Outcome.COMPLETED
    )


def page(found: Found) -> str:
    head = _INTRODUCTION.format(
        turns=TURNS,
        reply=REPLY_S,
        slots=SLOTS,
        fastest=FASTEST_S,
        slowest=f"{SLOWEST_S:g}",
        median=f"{MEDIAN_S:g}",
        concurrency=found.concurrency,
        faster=1 / found.scale,
        scale=found.scale,
        cores=os.cpu_count(),
        load=found.load,
        machine=platform.machine(),
        day=time.strftime("%Y-%m-%d"),
    )
    parts = [head, goal_table(goals(found)), _schedules(found), _local(found)]
    return "\n".join(parts)


def _schedules(found: Found) -> str:
    rows = []
    for name in found.rounds[0]:
        mine = [each[name] for each in found.rounds]
        rates = [each.per_minute for each in mine]
        rows.append(
            [
                name,
                f"{mine[0].rollouts:,}",
                number(median(rates)),
                f"{number(min(rates))} to {number(max(rates))}",
                f"{median(each.idle for each in mine):.0%}",
            ]
        )
    table = markdown(
        ["schedule", "rollouts", "a minute", f"of {len(found.rounds)} rounds", "engine idle"], rows
    )
    said = (
        "`lockstep`: each turn of a batch waits for the slowest step of the turn before.\n"
        f"`{BARRIER}`: the next batch begins when the slowest rollout of this one has ended.\n"
        "`engine idle`: the share of its slots' time."
    )
    if "Harbor's queue" not in found.rounds[0]:
        said += " Harbor was not at hand (`--harbor-python`)."
    return f"{table}\n{said}\n"


def _local(found: Found) -> str:
    rows = []
    for name, many in (("a few at once", found.single), ("many at once", found.many)):
        overhead = [each.overhead_s * 1000 for each in many.ended_]
        rows.append(
            [
                name,
                f"{len(many.ended_):,}",
                str(many.most_at_once),
                number(median(overhead)),
                ", ".join(
                    f"{stage} {number(median(each.stages[stage] for each in many.ended_) * 1000)}"
                    for stage in many.ended_[0].stages
                ),
                number(quantiles(overhead, n=100)[98]),
                number(len(many.ended_) / many.seconds),
                number(max(many.rss_mib)),
            ]
        )
    names = [
        "",
        "rollouts",
        "at once",
        "beside the agent, ms",
        "of these",
        "p99",
        "a second",
        "runner, MiB",
    ]
    return (
        "Processes of this machine, by the runner as `tracegrad run` uses it, with a proxy and its"
        " store. Each is a `sleep`:\nwhat it takes beside that is opening the rollout, a folder, a"
        " process, its outcome and its end; waiting for a free\nplace is left out.\n\n"
        + markdown(names, rows)
    )

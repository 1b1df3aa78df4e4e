"""The run as a page of Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from bench.rollouts.commands import Many
from bench.rollouts.containers import AT_ONCE, WARM, Containers
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
    """`rounds`: each schedule's of each round, by name. `single`, `many`: local processes.
    `containers`: or why there are none."""

    rounds: Sequence[Mapping[str, Measured]]
    concurrency: int
    scale: float
    load: float
    single: Many
    many: Many
    many_at_once: int
    containers: Containers | str


def ratio(found: Found) -> float:
    """Of this runner to the barrier, the median of the rounds' own."""
    return median(each[RUNNER].per_minute / each[BARRIER].per_minute for each in found.rounds)


def growth(many: Many) -> float:
    """Of the runner's memory from the second fifth of its rollouts to the last, in MiB."""
    fifth = len(many.rss_mib) // 5
    return median(many.rss_mib[-fifth:]) - median(many.rss_mib[fifth : 2 * fifth])


def goals(found: Found) -> list[Goal]:
    rise, errors = ratio(found), found.many.errors
    p50, _ = overhead_ms(found.single)
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
        *([] if isinstance(found.containers, str) else _of_containers(found.containers)),
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


def _of_containers(containers: Containers) -> list[Goal]:
    p50, p99 = overhead_ms(containers.warm)
    whole = containers.warm.errors == 0
    return [
        Goal(
            "one in a warm Docker sandbox, median",
            "below 400 ms",
            f"{p50:.0f} ms",
            p50 < 400 and whole,
        ),
        Goal("the same, p99", "below 1,500 ms", f"{p99:,.0f} ms", p99 < 1500 and whole),
    ]


def overhead_ms(many: Many) -> tuple[float, float]:
    """p50 and p99."""
    found = [each.overhead_s * 1000 for each in many.ended_]
    return median(found), quantiles(found, n=100, method="inclusive")[98]


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
    rows = [_row("processes, a few at once", found.single), _row("processes, many", found.many)]
    containers = found.containers
    if isinstance(containers, str):
        said = f"Containers were not measured: {containers}."
    else:
        rows.append(_row("containers, warm", containers.warm))
        rows.append(_row("containers, cold", containers.cold))
        said = (
            f"Containers of {containers.image}, 1 CPU and 256 MiB each. Warm: {AT_ONCE} agents at"
            f" once and {WARM} containers ready or\nstarting, the first {WARM} left out. Cold:"
            " each starts when it is asked for."
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
        "Commands by the runner as `tracegrad run` uses it, with a proxy and its store. Each is a"
        " `sleep` with `true` as its reward:\nwhat it takes beside the sleep is its sandbox, two"
        " processes, its outcome, its end and the sandbox's. Waiting for a\nfree place is left"
        " out.\n\n"
        f"{markdown(names, rows)}\n{said}\n"
    )


def _row(name: str, many: Many) -> list[str]:
    p50, p99 = overhead_ms(many)
    stages = {
        stage: median(each.stages[stage] * 1000 for each in many.ended_)
        for stage in many.ended_[0].stages
    }
    return [
        name,
        f"{len(many.ended_):,}",
        str(many.most_at_once),
        number(p50),
        ", ".join(f"{stage} {number(value)}" for stage, value in stages.items()),
        number(p99),
        number(len(many.ended_) / many.seconds),
        number(max(many.rss_mib)),
    ]

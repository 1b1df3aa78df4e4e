"""The page of a soak, and its picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from bench.proxy.machine import description
from bench.soak.dialects import DIALECTS
from bench.soak.run import SETTINGS, WORKERS, Outcome
from bench.soak.sampler import OURS
from bench.soak.traffic import ODD, Call
from bench.soak.verdicts import DRIFTS, Thirds, Verdict, percent, times
from bench.tables import markdown, number

_HELD_S = 0.01

_HEAD = f"""# Soak

The shop of `make demo` is trained without a pause (`trainer serve`: vLLM, a proxy of {WORKERS}
workers, two ranks), paced by the proxy's intake. Beside it people chat in all five dialects:
conversations of one to three turns arrive at random at a steady rate and wait for nobody, half of
them streamed, half with tools, named by path, by header or not at all; one in {ODD} hangs up in the
middle of a stream, one in {ODD} sends something malformed and must get a 4xx. Nobody trains on
them. A call's latency counts from when it was meant to start. The store is SQLite: the default,
whose write-ahead log is one more thing that can grow ([kills](bench-kills.md) has PostgreSQL).
Where the demo differs: {", ".join(f"`{name} = {value}`" for name, value in SETTINGS.items())}.

The first third is warm-up: caches fill, the model learns. What is judged is memory that belongs to
no file: the rings through which workers tell each other what they know have a fixed size, are
counted in each worker, and take tens of minutes to be written once. Growth is the Theil-Sen line
through the other two; drift is the last third over the middle one. The model in training says more
or less than it did, and longer replies take longer: the drift of the time to a call's end is of as
many replies of each length in both thirds, the times beside it are of all. In brackets: intervals
by bootstraps over blocks of neighbouring samples (95 %; of latency 99 %, as many figures are looked
at). "Surely" means that the whole interval says so.
"""


def page(found: Outcome, judged: Sequence[Verdict], picture: str | None) -> str:
    thirds = Thirds(found)
    minutes = (found.ended - found.began) / 60
    answered = len([call for call in found.calls if call.answer_id])
    parts = [
        _HEAD,
        "\n".join(f"- {line}" for line in description(["vllm", "torch"])),
        f"- {datetime.fromtimestamp(found.began, UTC):%Y-%m-%d}, {minutes:.0f} minutes;"
        f" {len(found.agents.answered):,} calls of agents, {answered:,} answered in the background;"
        f" {len(found.steps)} steps",
        "",
        markdown(["", "goal", "measured", "met"], [_row(verdict) for verdict in judged]),
        "\n## Processes\n",
        _roles(thirds),
        _disk_line(thirds),
        "\n## Background calls\n",
        _dialects(thirds),
        _pushes(thirds),
        "\n## Reward\n",
        _reward_line(thirds),
    ]
    if picture is not None:
        parts.append(f"\n![Memory, latency and reward over time]({picture})\n")
    return "\n".join(parts)


def _row(verdict: Verdict) -> list[str]:
    met = {True: "yes", False: "**no**", None: "too short to say"}[verdict.met]
    return [verdict.what, verdict.wanted, verdict.measured, met]


def _roles(thirds: Thirds) -> str:
    """Processes of vLLM are not judged."""
    rows = []
    for role in thirds.roles():
        some = [one for one in thirds.settled if role in one.roles]
        first, last = some[0], some[-1]
        rss = thirds.usage(role, lambda usage: usage.rss_mib)
        own = thirds.usage(role, lambda usage: usage.anonymous_mib)
        seconds = last.at - first.at
        cpu = last.roles[role].cpu_s - first.roles[role].cpu_s
        rows.append(
            [
                role + ("" if role in OURS else " (not ours)"),
                str(last.roles[role].processes),
                number(first.roles[role].rss_mib),
                number(last.roles[role].rss_mib),
                "" if rss is None else percent(rss),
                "" if own is None else f"{percent(own)} of {number(own.level)} MiB",
                f"{first.roles[role].fds}, {last.roles[role].fds}",
                f"{first.roles[role].threads}, {last.roles[role].threads}",
                f"{100 * cpu / seconds:.0f} %" if seconds else "",
            ]
        )
    header = [
        "",
        "processes",
        "MiB after a third",
        "MiB in the end",
        "growth between",
        "of own memory",
    ]
    return markdown([*header, "descriptors", "threads", "CPU of a core"], rows)


def _disk_line(thirds: Thirds) -> str:
    first, last = thirds.settled[0], thirds.settled[-1]
    sizes = ", ".join(
        f"{name} {number(first.disk_mib.get(name, 0.0))} to {number(size)} MiB"
        for name, size in sorted(last.disk_mib.items())
    )
    name = "turns_committed_total"
    turns = last.metrics.get(name, 0.0) - first.metrics.get(name, 0.0)
    grown = last.disk_mib.get("store", 0.0) - first.disk_mib.get("store", 0.0)
    a_turn = f"; the store takes {grown * (1 << 20) / turns:,.0f} bytes a turn" if turns else ""
    return f"On disk after a third and in the end: {sizes}{a_turn}.\n"


def _dialects(thirds: Thirds) -> str:
    rows = []
    for dialect in [*(one.name for one in DIALECTS), None]:
        rows.append(_latencies(thirds, dialect or "all", _of(thirds, dialect)))
    for name, held in (("all that no push held", False), ("all that a push held", True)):
        rows.append(_latencies(thirds, name, _held(thirds, held)))
    names = [f"{name}, ms: middle third, last third, times" for name in DRIFTS.values()]
    return markdown(["", "calls", *names, "mean tokens"], rows)


def _of(thirds: Thirds, dialect: str | None) -> Callable[[int], list[Call]]:
    return lambda third: thirds.calls(third, dialect)


def _held(thirds: Thirds, held: bool) -> Callable[[int], list[Call]]:
    waits = thirds.found.gate_s
    return lambda third: [
        call
        for call in thirds.calls(third)
        if (waits.get(call.answer_id or "", 0.0) > _HELD_S) == held
    ]


def _latencies(thirds: Thirds, name: str, calls: Callable[[int], list[Call]]) -> list[str]:
    middle, last = calls(1), calls(2)
    row = [name, f"{len(middle) + len(last):,}"]
    for what in DRIFTS:
        share = 95 if what == "p95" else 50
        sides = []
        for some in (middle, last):
            values = [call.first_s if what == "first" else call.seconds for call in some]
            known = [value for value in values if value is not None]
            sides.append(number(1e3 * _percentile(share, known)) if known else "")
        row.append(f"{sides[0]}, {sides[1]}, {times(thirds.drift(calls, what))}")
    tokens = [
        statistics.fmean(call.tokens for call in some) if some else 0 for some in (middle, last)
    ]
    return [*row, f"{tokens[0]:.1f}, {tokens[1]:.1f}"]


def _pushes(thirds: Thirds) -> str:
    waits = [
        [wait for call in thirds.calls(third) if (wait := _wait(thirds, call)) > _HELD_S]
        for third in (1, 2)
    ]
    medians = [number(1e3 * statistics.median(some)) if some else "none" for some in waits]
    kinds = {
        kind: len([call for call in thirds.found.calls if call.kind == kind])
        for kind in ("whole", "stream", "hang_up", "malformed")
    }
    return (
        f"Median wait of a held call for a push: {medians[0]} ms in the middle third,"
        f" {medians[1]} ms in the last. Of all {len(thirds.found.calls):,} calls {kinds['whole']:,}"
        f" were whole, {kinds['stream']:,} streamed, {kinds['hang_up']:,} hung up,"
        f" {kinds['malformed']:,} were malformed.\n"
    )


def _wait(thirds: Thirds, call: Call) -> float:
    return thirds.found.gate_s.get(call.answer_id or "", 0.0)


def _reward_line(thirds: Thirds) -> str:
    rewards = [thirds.rewards(third) for third in range(3)]
    means = ", ".join(f"{statistics.fmean(some):.3f}" if some else "none" for some in rewards)
    found = thirds.found
    return (
        f"Mean reward of training rollouts by thirds: {means}. Greedy success on held-out tasks:"
        f" {found.before:.2f} before, {found.after:.2f} after.\n"
    )


_COLOURS = ("#2a6f97", "#e07a1f", "#2f8f5b", "#8a9099", "#b23a48", "#6a4c93", "#c9a227", "#444444")


def draw(found: Outcome, path: Path) -> None:
    """Own memory by role, latency and reward by minute, as SVG."""
    # Texts stay texts, and the same run gives the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "soak"}
    figure = Figure(figsize=(9, 8), layout="constrained")
    memory, latency, reward = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    samples = [one for one in found.samples if found.began <= one.at <= found.ended]
    roles = list(dict.fromkeys(role for one in samples for role in one.roles))
    for role, colour in zip(roles, _COLOURS, strict=False):
        some = [one for one in samples if role in one.roles][::3]
        minutes = [(one.at - found.began) / 60 for one in some]
        own = [one.roles[role].anonymous_mib for one in some]
        memory.plot(minutes, own, color=colour, label=role)
    memory.set_yscale("log")
    memory.set_ylabel("own memory, MiB")
    memory.legend(ncols=4, frameon=False, fontsize=8)
    calls = [(call.at, call.seconds) for call in found.calls if call.answer_id is not None]
    for share, colour in ((50, _COLOURS[0]), (95, _COLOURS[1])):
        at, values = _by_minute(found, calls, partial(_percentile, share))
        latency.plot(at, values, color=colour, label=f"{share} %")
    latency.set_ylim(bottom=0)
    latency.set_ylabel("background call, s")
    latency.legend(frameon=False, fontsize=8)
    rewards = [(one.finished_at, one.reward) for one in found.rewards]
    reward.plot(*_by_minute(found, rewards, statistics.fmean), color=_COLOURS[2])
    reward.set_ylim(-0.02, 1.02)
    reward.set_ylabel("mean reward")
    reward.set_xlabel("minutes")
    for axes in (memory, latency, reward):
        axes.grid(axis="y", color="#8a9099", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _percentile(share: float, values: Sequence[float]) -> float:
    return float(np.percentile(values, share))


def _by_minute(
    found: Outcome,
    points: Sequence[tuple[float, float]],
    statistic: Callable[[list[float]], float],
) -> tuple[list[float], list[float]]:
    minutes: dict[int, list[float]] = {}
    for at, value in points:
        if found.began <= at <= found.ended:
            minutes.setdefault(int((at - found.began) // 60), []).append(value)
    return (
        [minute + 0.5 for minute in sorted(minutes)],
        [statistic(minutes[minute]) for minute in sorted(minutes)],
    )

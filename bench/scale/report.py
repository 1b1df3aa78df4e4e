"""The page: docs/bench-scale.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from bench.scale.day import Span
from bench.scale.demands import Demands, Deployment, Part, bottleneck, parts, scaled
from bench.scale.measure import Found, Measured
from bench.scale.needs import Assumptions, Needs, changed, needs
from bench.scale.workload import (
    HOUR_S,
    LARGE_MODEL,
    SMALL_MODEL,
    EngineRates,
    Length,
    Workload,
)
from bench.tables import markdown, number

WORKERS = (1, 2, 4, 8)
CONCURRENT = (10, 1_000, 100_000)
# Of which the sensitivities are shown.
_MANY = 1_000

_HEAD = """# A day of {agents:,} agents

Written by `make bench-scale`; do not edit. A day's calls of {agents:,} agents go through the real
proxy, as a server of its own, and the real store, once in a SQLite file and once in a PostgreSQL
server; the clock that is recorded is virtual and goes on as soon as all that is due has been
answered. The engine is a mock: it tokenises, samples ids with log-probabilities of the workload's
lengths, and answers at once. How long an engine would have taken comes from token rates.

The method is the utilization law: a part that is busy for D seconds with each call is busy for X·D
of each second at X calls a second. D is measured; the part that comes to 1 first is the
bottleneck.
"""
_PARTS = """
Milliseconds a call at the peak hour, with the events that come with it; beside them those of calls
that come one after another, each with a commit of its own: the store's writer is between both. The
writer's are seconds of its thread, with its waiting for the disk or the database's server, and
without that for a core; its CPU is in the proxy's too. Of one worker; *grows to* is the day's
traffic, as a multiple, at which the part is full.
"""
_LIMITS = """## What this does not show

- Agents, engine, proxy and database share the machine's cores. CPU seconds depend on that little;
  the writer's seconds go by the clock, so that where it waits for a server or for the interpreter
  that waits for a core, they come out longer than on machines of their own.
- The engine's chunks follow each other at once, so that the proxy is woken less often than by an
  engine that takes its time; [What the proxy costs](bench-proxy.md) has paced streams.
- An interpreter's lock lets the threads of a process have little more than one core together: a
  worker counts as full at one core of CPU.
- Utilization says when a part is full, not how long calls wait before it: above 60 to 80 % queues
  grow. With W workers the CPU is divided by W; what workers tell each other is not in it.
- All agents' tools and engines are mean times without failures, retries, pushes of weights or a
  trainer that reads the same store.
- The writer's seconds hold its waiting for the interpreter's lock, too; one by one there is less of
  that. A part that comes before another by only one of the two figures is not surely the first.
- Each changed assumption was measured once, one after another, with SQLite; what it changed there
  scales PostgreSQL's columns. A writer's share that falls as tokens grow is noise.
- 100,000 rollouts are a line through some 20 calls a second. That one PostgreSQL takes so many
  commits, connections and bytes is not shown, what disks write is no part, and
  `deploy/haproxy.cfg` has room for 16 proxies.
"""


def page(found: Found, *, made: Sequence[str], machine: Sequence[str]) -> str:
    workload = found.workload
    return "\n".join(
        [
            _HEAD.format(agents=workload.agents),
            *(f"- {line}" for line in [*made, *machine]),
            *(f"- {_sampled(each)}" for each in found.databases),
            "\n## The first bottleneck\n",
            bottlenecks(found),
            _deployed(Deployment()),
            "## The workload\n",
            workload_table(workload),
            _expected(workload),
            "\n## Demands\n" + _PARTS,
            parts_table(found),
            *(_hours(each) for each in found.databases),
            "## What concurrent rollouts need\n",
            _assumed(found, Assumptions()),
            needs_table(found),
            f"## What {_MANY:,} of them need, with one assumption changed\n",
            "Proxy and store are those that were measured with the changed workload, calls one by"
            f" one, relative to the unchanged. Engines: {found.engine.name}.\n",
            sensitivity_table(found),
            _LIMITS,
        ]
    )


def _sampled(measured: Measured) -> str:
    day = measured.day
    failed = "; ".join(f"{times} times {what}" for what, times in day.failed.most_common(3))
    return (
        f"{measured.database}: one agent in {day.every}, {day.whole.done.calls:,.0f} calls in"
        f" {day.whole.done.wall_s / 60:.1f} minutes, in steps of {day.tick_s} virtual seconds;"
        f" hours below are times {day.every}. Its busiest hour had {number(peak_calls_s(measured))}"
        f" calls/s. Failed: {failed or 'none'}"
    )


def peak_calls_s(measured: Measured) -> float:
    """Of all agents, in the hour with the most calls of those that were simulated."""
    peak = measured.day.peak
    return peak.done.calls * measured.day.every / (peak.end - peak.begin)


def _parts_of(measured: Measured, demands: Demands, workers: int = 1) -> list[Part]:
    return parts(
        demands,
        Deployment(workers=workers),
        database_server=measured.database == "PostgreSQL",
    )


def bottlenecks(found: Found) -> str:
    rows = []
    rate = found.workload.peak_calls_s
    for measured in found.databases:
        for workers in WORKERS:
            part = bottleneck(_parts_of(measured, measured.at_peak, workers))
            share = part.utilization(rate)
            rows.append(
                [
                    measured.database,
                    str(workers),
                    f"**{part.name}**",
                    f"{share:.1%}",
                    number(part.most_calls_s),
                    f"{1 / share:.1f} times",
                ]
            )
    header = ["store", "workers", "first bottleneck", "busy at the peak"]
    return markdown([*header, "full at calls/s", "the day grows to"], rows)


def _deployed(assumed: Deployment) -> str:
    return (
        f"Assumed: a database server with {assumed.database_cores} cores, and a network of"
        f" {assumed.network_bytes_s * 8 / 1e9:g} Gbit/s at the proxy's host. Workers are processes"
        " of one proxy, each with a core of its own.\n"
    )


def parts_table(found: Found) -> str:
    rows = []
    rate = found.workload.peak_calls_s
    for measured in found.databases:
        beside = _parts_of(measured, measured.one_by_one)
        for part, alone in zip(_parts_of(measured, measured.at_peak), beside, strict=True):
            share = part.utilization(rate)
            rows.append(
                [
                    measured.database,
                    part.name,
                    number(part.demand * 1e3),
                    number(alone.demand * 1e3),
                    f"{share:.1%}",
                    f"{1 / share:,.1f} times" if share else "",
                ]
            )
        peak = measured.at_peak
        alone_ = measured.one_by_one
        for name, here, there in (
            ("the writer's CPU", peak.writer_cpu_s * 1e3, alone_.writer_cpu_s * 1e3),
            ("its waiting for a core", peak.writer_delay_s * 1e3, alone_.writer_delay_s * 1e3),
            ("commits, not ms", peak.commits, alone_.commits),
        ):
            rows.append([measured.database, f"*{name}*", number(here), number(there), "", ""])
    header = ["store", "part", "ms a call", "one by one", "busy at the peak", "grows to"]
    return markdown(header, rows)


def workload_table(workload: Workload) -> str:
    rows = [[each.name, _written(getattr(workload, each.name))] for each in fields(workload)]
    return markdown(["assumption", "value"], rows)


def _written(value: object) -> str:
    if isinstance(value, Length):
        return (
            f"log-normal, median {value.median:g}, sigma {value.sigma:g}, {value.least} to"
            f" {value.most:,} tokens; mean {value.mean:.0f}"
        )
    if isinstance(value, tuple):
        return ", ".join(f"{name} {share:.0%}" for name, share in value)
    return f"{value:,}"


def _expected(workload: Workload) -> str:
    return (
        f"So {workload.expected_calls:,.0f} calls are to be expected, in rollouts of"
        f" {workload.mean_turns:.1f} turns, and {number(workload.peak_calls_s)} calls/s around the"
        f" peak; a prompt has {workload.mean_prompt:,.0f} tokens, of"
        f" which {workload.mean_new_tokens:,.0f} are new, and a reply"
        f" {workload.completion.mean:.0f}. The fields are explained in `bench/scale/workload.py`."
    )


def _hours(measured: Measured) -> str:
    every = measured.day.every
    spans = [*measured.day.hours, measured.day.whole]
    rows = [list(_hour(span, every)) for span in spans]
    rows[-1][0] = "*all*"
    header = ["hour", "calls", "rollouts begun", "prompt, M tokens", "new", "sampled"]
    header += ["proxy CPU, s", "ms a call"]
    header += ["writer busy, s", "commits", "events", "server CPU, s", "store grew, MB"]
    header += ["engine-hours", "HTTP, GB", "proxy, MiB"]
    return f"## By hour, {measured.database}\n\n" + markdown(header, rows)


def _hour(span: Span, every: int) -> Iterator[str]:
    done, used = span.done, span.used
    yield f"{span.begin / HOUR_S:.0f}"
    yield f"{done.calls * every:,.0f}"
    yield f"{done.rollouts * every:,.0f}"
    for tokens in (done.prompt_tokens, done.new_tokens, done.sampled_tokens):
        yield number(tokens * every / 1e6)
    yield number(used.proxy_cpu_s * every)
    yield number(used.proxy_cpu_s / done.calls * 1e3) if done.calls else ""
    for value in (used.writer_s, used.commits, used.events, used.database_cpu_s):
        yield number(value * every)
    yield number(used.store_bytes * every / 1e6)
    yield number(done.engine_s * every / HOUR_S)
    yield number((done.agent_bytes + used.engine_bytes) * every / 1e9)
    yield f"{span.memory / (1 << 20):,.0f}"  # of the process, whatever the share of agents


def _assumed(found: Found, assumed: Assumptions) -> str:
    rates = "; ".join(
        f"{each.name}: {each.prefill:,.0f} prompt tokens/s, {each.decode:g} tokens/s of each of"
        f" {each.sequences} sequences"
        for each in (SMALL_MODEL, LARGE_MODEL)
    )
    return (
        f"Assumed, none of it measured here: {rates}. Proxies and the database's cores are planned"
        f" for {assumed.proxy_utilization:.0%}, engines for {assumed.engine_utilization:.0%}. Texts"
        f" are kept for {assumed.text_days:g} days, tokens and rewards for {assumed.token_days:g}."
        f" Texts are {found.databases[1].text_share:.0%} of the bytes. Rollouts follow each other,"
        " so that there are always as many; proxies and disk are those of PostgreSQL.\n"
    )


def needs_of(
    found: Found,
    concurrent: int,
    rates: EngineRates,
    *,
    workload: Workload | None = None,
    measured: Demands | None = None,
) -> Needs:
    """`workload`: another than the measured one; `measured`: its demands, one by one."""
    sqlite, server = found.databases
    demands = sqlite.at_peak, server.at_peak
    if measured is not None:
        demands = (
            scaled(demands[0], measured, sqlite.one_by_one),
            scaled(demands[1], measured, sqlite.one_by_one),
        )
    return needs(
        concurrent,
        workload or found.workload,
        rates,
        sqlite=demands[0],
        server=demands[1],
        text_share=server.text_share,
        assumed=Assumptions(),
    )


def needs_table(found: Found) -> str:
    rows = [
        [f"{concurrent:,}", rates.name, *_needed(needs_of(found, concurrent, rates))]
        for concurrent in CONCURRENT
        for rates in (SMALL_MODEL, LARGE_MODEL)
    ]
    return markdown(["rollouts at once", "engine", *_NEEDED], rows)


_NEEDED = ["calls/s", "proxy processes", "events/s", "commits/s at most", "a SQLite writer is busy"]
_NEEDED += ["PostgreSQL cores", "GB a day", "GB kept", "engines", "Gbit/s"]


def _needed(found: Needs) -> list[str]:
    return [
        number(found.calls_s),
        f"{found.proxies:,}",
        number(found.writes_s),
        number(found.commits_s),
        f"{found.writer:.1%}" if found.writer <= 1 else f"**{found.writer:,.0%}**",
        number(found.database_cores),
        number(found.gb_a_day),
        number(found.gb_kept),
        f"{found.engines:,}",
        number(found.network_gbit_s),
    ]


def sensitivity_table(found: Found) -> str:
    rows = [["as assumed", "", *_needed(needs_of(found, _MANY, found.engine))]]
    for (assumption, factor), other in changed(found.workload).items():
        measured = found.variants.get((assumption, factor))
        need = needs_of(found, _MANY, found.engine, workload=other, measured=measured)
        rows.append([assumption, f"times {factor:g}", *_needed(need)])
    return markdown(["assumption", "", *_NEEDED], rows)

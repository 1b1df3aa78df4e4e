"""Measuring a cell: every server in every round, in turns, so that drift hits all alike."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.request import urlopen

import orjson

from bench.proxy.cells import Cell
from bench.proxy.engine import Pace
from bench.proxy.load import Measured, measure
from bench.proxy.peers import DIRECT
from bench.proxy.servers import HOST, Server

# A server that was cut off works on; it gets so long to come to rest.
_REST_LIMIT_S = 30.0
_REST_SHARE = 0.1
_WARM_CALLS_S = 0.2


@dataclass(frozen=True, slots=True)
class Round:
    """One server, once. Milliseconds; None where no call (or nothing to tell) was there."""

    calls_per_s: float
    p50: float | None
    p95: float | None
    first_p50: float | None
    first_p95: float | None
    calls: float
    errors: tuple[str, ...]
    unfinished: int
    server_cpu: float  # of the server itself, a call
    engine_cpu: float
    load_cpu: float


@dataclass(slots=True)
class Result:
    """All rounds of a cell, by server, in order."""

    cell: Cell
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def median(self, server: str, what: str) -> float | None:
        values = [getattr(one, what) for one in self.rounds[server]]
        found = [value for value in values if value is not None]
        return statistics.median(found) if found else None

    def added(self, server: str, what: str) -> float | None:
        """Over direct in the same round; the median of the rounds."""
        pairs = zip(self.rounds[server], self.rounds[DIRECT], strict=True)
        found = [
            mine - theirs
            for mine, theirs in ((getattr(a, what), getattr(b, what)) for a, b in pairs)
            if mine is not None and theirs is not None
        ]
        return statistics.median(found) if found else None

    def errors(self, server: str) -> list[str]:
        return [error for one in self.rounds[server] for error in one.errors]

    def unfinished(self, server: str) -> int:
        return sum(one.unfinished for one in self.rounds[server])


async def run(cell: Cell, servers: Mapping[str, Server]) -> Result:
    """`servers` has the cell's; those that it lacks are left out."""
    result = Result(cell)
    names = [name for name in cell.servers if name in servers]
    set_pace(servers[DIRECT], Pace(chunk_tokens=cell.chunk_tokens))
    for name in names:
        await _warm(cell, servers[name])
    set_pace(servers[DIRECT], cell.pace)
    for number in range(cell.rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            one = await _round(cell, servers[name], servers[DIRECT])
            result.rounds.setdefault(name, []).append(one)
            if one.unfinished:
                await _rest(servers[name])
    return result


def set_pace(engine: Server, pace: Pace) -> None:
    body = orjson.dumps({name: getattr(pace, name) for name in Pace.__slots__})
    with urlopen(f"http://{HOST}:{engine.port}/bench/pace", body, timeout=10) as answer:
        assert answer.status == 200


async def _warm(cell: Cell, server: Server) -> None:
    """A few calls that do not count, so that none pays for connections and first imports."""
    few = replace(cell, concurrency=min(cell.concurrency, 8), rate=None)
    await measure(server.port, replace(few.load(), issue_s=_WARM_CALLS_S, limit_s=20))


async def _round(cell: Cell, server: Server, engine: Server) -> Round:
    load = cell.load()
    gc.collect()
    gc.disable()
    before, engine_before, own_before = server.usage(), engine.usage(), time.process_time()
    try:
        measured = await measure(server.port, load)
    finally:
        gc.enable()
    calls = max(measured.calls, 1e-9)

    def each(seconds: float) -> float:
        return seconds / calls * 1e3

    engine_cpu = each(engine.usage().cpu_s - engine_before.cpu_s)
    own = each(server.usage().cpu_s - before.cpu_s)
    load_cpu = each(time.process_time() - own_before)
    calls_per_s = measured.calls_per_s(ramped=cell.concurrency if cell.rate else 0)
    return _summary(measured, calls_per_s, own, engine_cpu, load_cpu)


def _summary(
    measured: Measured, calls_per_s: float, server_cpu: float, engine_cpu: float, load_cpu: float
) -> Round:
    # The calls that were cut off are the slow ones: without them no percentile is true.
    good = [] if measured.unfinished else measured.good
    totals = [sample.total_s for sample in good]
    firsts = [sample.first_s for sample in good if sample.first_s is not None]
    return Round(
        calls_per_s=calls_per_s,
        p50=percentile(totals, 50),
        p95=percentile(totals, 95),
        first_p50=percentile(firsts, 50),
        first_p95=percentile(firsts, 95),
        calls=measured.calls,
        errors=tuple(measured.errors),
        unfinished=measured.unfinished,
        server_cpu=server_cpu,
        engine_cpu=engine_cpu,
        load_cpu=load_cpu,
    )


def percentile(seconds: Sequence[float], which: int) -> float | None:
    """In milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * which // 100, len(ordered) - 1)] * 1e3


async def _rest(server: Server) -> None:
    deadline = time.monotonic() + _REST_LIMIT_S
    while time.monotonic() < deadline:
        before = server.usage().cpu_s
        await asyncio.sleep(0.3)
        if server.usage().cpu_s - before < 0.3 * _REST_SHARE:
            return

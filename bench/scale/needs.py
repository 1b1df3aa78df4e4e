"""What so many concurrent rollouts need, by the demands that were measured and by assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.scale.demands import Demands
from bench.scale.workload import DAY_S, EngineRates, Workload


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Utilizations: what the parts are planned for, so that queues stay short. Retention: days that
    a rollout's texts are kept, and its tokens, log-probabilities and rewards."""

    proxy_utilization: float = 0.6
    engine_utilization: float = 0.8
    text_days: float = 7.0
    token_days: float = 90.0


@dataclass(frozen=True, slots=True)
class Needs:
    """`proxies`: processes, with a core each. `writes_s`: events, turns among them, a second;
    `commits_s`: transactions a second, at most: the more calls wait, the more share one. `writer`:
    utilization of the one writer that a SQLite file has. `database_cores`: of a server, at the
    proxies' utilization. GB are of 10^9 bytes."""

    concurrent: int
    calls_s: float
    proxies: int
    writes_s: float
    commits_s: float
    writer: float
    database_cores: float
    gb_a_day: float
    gb_kept: float
    engines: int
    network_gbit_s: float


def calls_a_second(concurrent: int, workload: Workload, rates: EngineRates) -> float:
    """Of rollouts that are followed by others as they end: their calls over the time they take, in
    which the engine answers each call and a tool follows each but the last. By Little's law."""
    turns = workload.mean_turns
    latency = rates.latency_s(workload.mean_new_tokens, workload.completion.mean)
    rollout_s = turns * latency + (turns - 1) * workload.tool_s
    return concurrent * turns / rollout_s


def needs(
    concurrent: int,
    workload: Workload,
    rates: EngineRates,
    *,
    sqlite: Demands,
    server: Demands,
    text_share: float,
    assumed: Assumptions,
) -> Needs:
    """`sqlite`, `server`: demands with a store in each. `text_share`: of the store's bytes, those
    of texts. Proxies and disk are those of a database server."""
    calls_s = calls_a_second(concurrent, workload, rates)
    gb_a_day = calls_s * DAY_S * server.store_bytes / 1e9
    kept_days = text_share * assumed.text_days + (1 - text_share) * assumed.token_days
    busy = rates.busy_s(workload.mean_new_tokens, workload.completion.mean)
    return Needs(
        concurrent,
        calls_s,
        proxies=_enough(calls_s * server.proxy_s, assumed.proxy_utilization),
        writes_s=calls_s * server.events,
        commits_s=calls_s * (1 + server.posts),
        writer=calls_s * sqlite.writer_s,
        database_cores=calls_s * server.database_s / assumed.proxy_utilization,
        gb_a_day=gb_a_day,
        gb_kept=gb_a_day * kept_days,
        engines=_enough(calls_s * busy, assumed.engine_utilization),
        network_gbit_s=calls_s * server.network_bytes * 8 / 1e9,
    )


def _enough(busy: float, utilization: float) -> int:
    """Servers, where together they are busy for so many seconds of each second."""
    return max(1, math.ceil(busy / utilization))


# The assumptions that matter most, and by how much each is changed.
FACTORS = (0.5, 2.0)
LONGER_REPLIES, SLOWER_TOOLS, LONGER_OUTPUTS = (
    "tokens of a reply",
    "seconds of a tool",
    "tokens of a tool's output",
)


def changed(workload: Workload) -> Mapping[tuple[str, float], Workload]:
    """The workload with one assumption changed, by its name and the factor."""
    replies, outputs = workload.completion, workload.observation
    changes: Mapping[str, Callable[[float], Workload]] = {
        LONGER_REPLIES: lambda factor: replace(workload, completion=replies.times(factor)),
        SLOWER_TOOLS: lambda factor: replace(workload, tool_s=workload.tool_s * factor),
        LONGER_OUTPUTS: lambda factor: replace(workload, observation=outputs.times(factor)),
    }
    return {(name, by): change(by) for name, change in changes.items() for by in FACTORS}

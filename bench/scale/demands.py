"""The utilization law of queueing networks: a part that is busy for D seconds with each call (its
service demand) is busy for X·D of each second at X calls a second. The part that comes to 1 first
is the bottleneck, and X = 1/D bounds what the whole can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.scale.day import Span


@dataclass(frozen=True, slots=True)
class Demands:
    """Of a call, its share of `posts` (a rollout opened or ended, a reward) included. Seconds: of a
    core for `proxy_s`, `writer_cpu_s` and `database_s`, of the writer's thread for `writer_s` (its
    waiting for the disk included, for a core not), of an engine by its rates for `engine_s`. Bytes:
    on the disk, and of HTTP bodies that the proxy takes and gives."""

    proxy_s: float
    writer_s: float
    writer_cpu_s: float
    writer_delay_s: float
    database_s: float
    engine_s: float
    commits: float
    posts: float
    events: float
    store_bytes: float
    network_bytes: float

    @classmethod
    def of(cls, busy: Span, whole: Span) -> Demands:
        """Times are those of `busy`, an hour; bytes those of `whole`, the day, since a database's
        file grows in steps. Raises ValueError where no call was made."""
        calls, all_calls = busy.done.calls, whole.done.calls
        if not calls:
            raise ValueError("no call was made: there is nothing to divide by")
        network = whole.done.agent_bytes + whole.used.engine_bytes
        return cls(
            proxy_s=busy.used.proxy_cpu_s / calls,
            writer_s=busy.used.writer_s / calls,
            writer_cpu_s=busy.used.writer_cpu_s / calls,
            writer_delay_s=busy.used.writer_delay_s / calls,
            database_s=busy.used.database_cpu_s / calls,
            engine_s=busy.done.engine_s / calls,
            commits=busy.used.commits / calls,
            posts=busy.done.posts / calls,
            events=busy.used.events / calls,
            store_bytes=whole.used.store_bytes / all_calls,
            network_bytes=network / all_calls,
        )


def scaled(demands: Demands, measured: Demands, base: Demands) -> Demands:
    """`demands` as another workload would have them: times what was `measured` for that one, over
    what was for this one (`base`) in the same way."""
    return replace(
        demands,
        **{
            name: getattr(demands, name) * getattr(measured, name) / getattr(base, name)
            for name in ("proxy_s", "writer_s", "store_bytes", "network_bytes")
        },
    )


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the parts have. Workers are processes of one proxy; each has a core."""

    workers: int = 1
    database_cores: int = 4
    network_bytes_s: float = 1.25e9  # 10 Gbit/s


@dataclass(frozen=True, slots=True)
class Part:
    """`demand`: seconds of one of its `servers` that a call takes."""

    name: str
    demand: float
    servers: float = 1.0

    def utilization(self, calls_s: float) -> float:
        return calls_s * self.demand / self.servers

    @property
    def most_calls_s(self) -> float:
        """At which it is full."""
        return self.servers / self.demand if self.demand else float("inf")


def parts(demands: Demands, deployment: Deployment, *, database_server: bool) -> list[Part]:
    """Those that calls go through. Writers of one SQLite file take turns, so that there is one at
    a time whatever the number of workers; a database server has one for each of them."""
    workers = deployment.workers
    found = [
        Part("the proxy's CPU", demands.proxy_s, workers),
        Part("the store's writer", demands.writer_s, workers if database_server else 1),
        Part("the network of the proxy's host", demands.network_bytes / deployment.network_bytes_s),
    ]
    if database_server:
        cores = deployment.database_cores
        found.append(Part("the database server's CPU", demands.database_s, cores))
    return found


def bottleneck(found: Sequence[Part]) -> Part:
    """The part that is full first."""
    return min(found, key=lambda part: part.most_calls_s)

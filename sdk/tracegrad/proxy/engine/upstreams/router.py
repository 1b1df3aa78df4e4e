"""Which server a call goes to.

A rollout's prompts grow out of each other, so they go to one server, which has their prefix in
its cache. That server is chosen when the rollout is first seen, as the least busy one, and
remembered. Hashing names would need no memory, but a handful of rollouts on two servers easily
falls 11 to 5, and the step waits for the slower one.

A rollout whose server is down moves, and stays where it went: a server that was restarted has
an empty cache, the new one has the rollout's last prompt. It moves too when its server has
become far busier than another, which is how load comes back to a server that was away.

Where one server has the weights of a candidate (`Canary`), it gets its share of rollouts and the
others get the rest, each by the rollout's name alone: the same in every worker, and after a
restart. A rollout changes sides only where nobody on its own takes calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from cachetools import LRUCache

from tracegrad.proxy.engine.weight_gate import Canary
from tracegrad.proxy.shared_log import SharedLog

# Rollouts remembered, least recently used first to go; one that is forgotten is placed again.
REMEMBERED = 16_384
# A rollout leaves a server with more than twice the calls in flight of the least busy one, and
# this many more: below that a cached prefix is worth more than a shorter queue.
MARGIN = 8


class RoutedServer(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def takes_calls(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...


ServerT = TypeVar("ServerT", bound=RoutedServer)


class _Home(NamedTuple):
    """The later one holds, of two at once the one that comes first: workers that place a rollout
    at the same time agree, in whatever order they hear of each other."""

    since: float  # of the machine's monotonic clock, which all workers share
    server: int

    def replaces(self, other: _Home | None) -> bool:
        return other is None or (self.since, -self.server) > (other.since, -other.server)


class UpstreamRouter(Generic[ServerT]):
    def __init__(
        self,
        servers: Sequence[ServerT],
        remembered: int = REMEMBERED,
        others: SharedLog | None = None,
        canary: Callable[[], Canary | None] = lambda: None,
    ) -> None:
        """`others`: the other workers of the proxy; a rollout has one home for all of them.
        `canary`: the one that there is now."""
        self._canary = canary
        self._others = others
        if others is not None:
            others.subscribe("home", self._moved)
        self._servers = servers
        self._homes: LRUCache[str, _Home] = LRUCache(remembered)
        self._rollouts = [0] * len(servers)  # at home on each

    def choose(self, rollout: str | None) -> ServerT | None:
        """The server for a call that goes out now; None while none takes any."""
        if len(self._servers) == 1:
            only = self._servers[0]
            return only if only.takes_calls else None
        eligible = self._eligible(rollout)
        best = min(eligible, key=self._load, default=None)
        if best is None or rollout is None:
            return None if best is None else self._servers[best]
        home = self._homes.get(rollout)
        if home is None or home.server not in eligible or not self._keeps(home.server, best):
            home = _Home(time.monotonic(), best)
            self._move(rollout, home)
            if self._others is not None:
                self._others.publish("home", rollout, *home)
        return self._servers[home.server]

    def _eligible(self, rollout: str | None) -> list[int]:
        open_ = [number for number, server in enumerate(self._servers) if server.takes_calls]
        canary = self._canary()
        if canary is None or canary.upstream is None:
            return open_
        is_candidates = canary.has(rollout)
        ours = [n for n in open_ if (self._servers[n].url == canary.upstream) == is_candidates]
        return ours or open_

    def _load(self, number: int) -> tuple[int, int]:
        """Calls in flight; among equals, the rollouts that may call at any moment."""
        return self._servers[number].in_flight, self._rollouts[number]

    def _keeps(self, home: int, best: int) -> bool:
        busy = self._servers[home].in_flight
        return busy <= 2 * self._servers[best].in_flight + MARGIN

    def _moved(self, rollout: str, since: float, server: int) -> None:
        home = _Home(since, server)
        if home.replaces(self._homes.get(rollout)):
            self._move(rollout, home)

    def _move(self, rollout: str, home: _Home) -> None:
        old = self._homes.get(rollout)
        if old is None and len(self._homes) >= self._homes.maxsize:
            _, old = self._homes.popitem()
        if old is not None:
            self._rollouts[old.server] -= 1
        self._homes[rollout] = home
        self._rollouts[home.server] += 1

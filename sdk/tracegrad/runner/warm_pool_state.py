"""What a warm pool does next: decisions alone, nothing is started or waited for here.

One machine for the pools of all specs, since they share one bound.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)  # a spec
I = TypeVar("I")  # noqa: E741 (an item: a sandbox)
T = TypeVar("T", bound=Hashable)  # a ticket: who waits


@dataclass(frozen=True, slots=True)
class Start(Generic[S]):
    spec: S


@dataclass(frozen=True, slots=True)
class Hand(Generic[T, I]):
    ticket: T
    item: I


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    ticket: T
    error: Exception


@dataclass(frozen=True, slots=True)
class Close(Generic[I]):
    item: I


Action = Start[S] | Hand[T, I] | Refuse[T] | Close[I]


@dataclass(slots=True)
class _Pool(Generic[I, T]):
    """`ready`: with the time since when, the oldest first."""

    ready: deque[tuple[float, I]] = field(default_factory=deque)
    starting: int = 0
    waiting: deque[T] = field(default_factory=deque)
    failed: bool = False  # the last start did: none is made ahead until one succeeds

    @property
    def held(self) -> int:
        return len(self.ready) + self.starting


class WarmPoolState(Generic[S, I, T]):
    """Each event's answer is what is to be done, in order.

    `size`: ready and starting ones of a spec; `total`: of all specs. `idle_s`: how long one stays
    ready that nobody takes. `comes_back`: used ones of a spec are `returned`, and none is started
    ahead of them.
    """

    def __init__(
        self,
        *,
        size: int,
        total: int,
        idle_s: float,
        comes_back: Callable[[S], bool] = lambda spec: False,
    ) -> None:
        assert 1 <= size <= total, f"size {size}, total {total}"
        self._size, self._total, self._idle_s = size, total, idle_s
        self._comes_back = comes_back
        # The one that was asked for last comes last.
        self._pools: OrderedDict[S, _Pool[I, T]] = OrderedDict()
        self._drained: Exception | None = None

    def held(self, spec: S | None = None) -> int:
        """Ready and starting ones; None: of all specs."""
        if spec is not None:
            return self._pools[spec].held if spec in self._pools else 0
        return sum(pool.held for pool in self._pools.values())

    def ready(self, spec: S) -> int:
        return len(self._pools[spec].ready) if spec in self._pools else 0

    def waiting(self, spec: S) -> int:
        return len(self._pools[spec].waiting) if spec in self._pools else 0

    # Events

    def asked(self, spec: S, ticket: T, *, first: bool = False) -> list[Action[S, T, I]]:
        """Somebody wants one. `first`: what he was handed turned out to be dead."""
        if self._drained is not None:
            return [Refuse(ticket, self._drained)]
        pool = self._pools.setdefault(spec, _Pool())
        self._pools.move_to_end(spec)
        (pool.waiting.appendleft if first else pool.waiting.append)(ticket)
        return self._settle()

    def gave_up(self, spec: S, ticket: T) -> list[Action[S, T, I]]:
        """Who waited does so no more."""
        pool = self._pools.get(spec)
        if pool is not None and ticket in pool.waiting:
            pool.waiting.remove(ticket)
        return self._settle()

    def started(self, spec: S, item: I, now: float) -> list[Action[S, T, I]]:
        pool = self._pools[spec]
        pool.starting -= 1
        pool.failed = False
        pool.ready.append((now, item))
        return self._settle()

    def failed(self, spec: S, error: Exception) -> list[Action[S, T, I]]:
        """Who waits longest hears of it: he knows whether to try again."""
        pool = self._pools[spec]
        pool.starting -= 1
        pool.failed = True
        actions: list[Action[S, T, I]] = []
        if pool.waiting:
            actions.append(Refuse(pool.waiting.popleft(), error))
        return actions + self._settle()

    def returned(self, spec: S, item: I, now: float) -> list[Action[S, T, I]]:
        """One that was used, and is as good as new."""
        pool = self._pools.setdefault(spec, _Pool())
        room = pool.held < self._size and self.held() < self._total
        if self._drained is not None or not (room or pool.waiting):
            return [Close(item), *self._settle()]
        if pool.waiting:
            return [Hand(pool.waiting.popleft(), item), *self._settle()]
        pool.ready.append((now, item))
        return self._settle()

    def time(self, now: float) -> list[Action[S, T, I]]:
        """Those that nobody took for long go, and are not replaced until somebody asks again."""
        actions: list[Action[S, T, I]] = []
        for pool in self._pools.values():
            while pool.ready and now - pool.ready[0][0] > self._idle_s:
                actions.append(Close(pool.ready.popleft()[1]))
        self._forget()
        return actions

    def drained(self, error: Exception) -> list[Action[S, T, I]]:
        """No more: who waits is refused, what is ready goes, and so does what still starts."""
        self._drained = error
        actions: list[Action[S, T, I]] = []
        for pool in self._pools.values():
            actions += [Refuse(ticket, error) for ticket in pool.waiting]
            pool.waiting.clear()
        return actions + self._settle()

    # What follows

    def _settle(self) -> list[Action[S, T, I]]:
        actions: list[Action[S, T, I]] = []
        if self._drained is not None:
            for pool in self._pools.values():
                actions += [Close(item) for _, item in pool.ready]
                pool.ready.clear()
        else:
            handed = self._hand_out(actions)
            self._start_for_waiting(actions)
            if handed is not None:
                self._start_ahead(handed, actions)
        self._forget()
        return actions

    def _hand_out(self, actions: list[Action[S, T, I]]) -> S | None:
        """The last spec of which one was."""
        handed = None
        for spec, pool in self._pools.items():
            while pool.ready and pool.waiting:
                actions.append(Hand(pool.waiting.popleft(), pool.ready.popleft()[1]))
                handed = spec
        return handed

    def _start_for_waiting(self, actions: list[Action[S, T, I]]) -> None:
        """Those asked for first come first; for them ready ones of other specs make room."""
        for spec, pool in self._pools.items():
            while pool.starting < len(pool.waiting) and pool.held < self._size:
                if self.held() >= self._total and not self._make_room(actions):
                    return
                pool.starting += 1
                actions.append(Start(spec))

    def _make_room(self, actions: list[Action[S, T, I]]) -> bool:
        for pool in self._pools.values():
            if pool.ready:
                actions.append(Close(pool.ready.popleft()[1]))
                return True
        return False

    def _start_ahead(self, spec: S, actions: list[Action[S, T, I]]) -> None:
        """While the agent runs that got the last one; nobody makes room for a guess."""
        pool = self._pools[spec]
        if self._comes_back(spec):
            return
        while not pool.failed and pool.held < self._size and self.held() < self._total:
            pool.starting += 1
            actions.append(Start(spec))

    def _forget(self) -> None:
        for spec in [s for s, p in self._pools.items() if not (p.held or p.waiting)]:
            del self._pools[spec]

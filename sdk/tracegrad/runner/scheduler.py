"""Which attempt begins next, which are made again, and which are cut: a state machine without
clocks, processes or sockets. `driver.py` does what it says.

A group is the attempts at one task in one epoch that are compared with each other. It is filled
when as many of its attempts were scored as were asked for.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tracegrad.events import Outcome
from tracegrad.runner.breaker import Breaker


class GroupKey(NamedTuple):
    """Names a group over interruptions. `epoch` counts from 0."""

    epoch: int
    task_id: str


class Ticket(NamedTuple):
    """One attempt. `number` counts those of the group from 0, replacements too."""

    group: GroupKey
    number: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group that is to be made. `ended`: what an earlier run has of it."""

    key: GroupKey
    ended: Sequence[Outcome] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """
    Attributes:
        attempts: of a group.
        over_sample: attempts beyond them; those that have not ended when the group is filled are
            cut.
        agents: that run at once.
        ahead: attempts that start or wait for an agent's place beside them.
        retries: replacements in a group, for each attempt asked for, of those that failed by no
            doing of the agent. A group that has had one failure more than this by its
            environment, and no success of it, gets none.
        first_delay_s, longest_delay_s: before a replacement; doubled with each of the group, times
            a random factor of 0.5 to 1.5.
    """

    attempts: int = 1
    over_sample: int = 0
    agents: int = 8
    ahead: int = 4
    retries: int = 2
    first_delay_s: float = 1.0
    longest_delay_s: float = 60.0


@dataclass(slots=True)
class _Group:
    key: GroupKey
    wanted: int
    to_begin: int
    next_number: int = 0
    scored: int = 0
    broken: int = 0  # failures of the environment
    replaced: int = 0
    delayed: int = 0  # replacements that are not due yet
    live: set[Ticket] = field(default_factory=set)
    given_up: bool = False

    @property
    def is_filled(self) -> bool:
        return self.scored >= self.wanted

    @property
    def is_over(self) -> bool:
        return not (self.live or self.to_begin or self.delayed)

    @property
    def expected(self) -> int:
        return self.scored + len(self.live) + self.to_begin + self.delayed


@dataclass(slots=True)
class Counts:
    """What has happened. `groups`: those that are over; `filled` of them had all their attempts."""

    ended: Counter[Outcome] = field(default_factory=Counter)
    begun: int = 0
    replaced: int = 0
    cut: int = 0
    groups: int = 0
    filled: int = 0


class Scheduler:
    """One run's. The caller says what happens, and asks for what follows."""

    def __init__(
        self,
        groups: Iterable[GroupPlan],
        settings: SchedulerSettings,
        rng: random.Random | None = None,
    ) -> None:
        self._source: Iterator[GroupPlan] | None = iter(groups)
        self._settings = settings
        self._rng = rng or random.Random()
        self._groups: dict[GroupKey, _Group] = {}  # that are not over, the oldest first
        self._delayed: list[tuple[float, int, GroupKey]] = []
        self._before_agent: set[Ticket] = set()
        self._with_agent: set[Ticket] = set()
        self._after_agent: set[Ticket] = set()
        self._starting: set[Ticket] = set()
        self._stopping = False
        self.breaker = Breaker()
        self.counts = Counts()

    @property
    def is_done(self) -> bool:
        """Nothing runs, and nothing will."""
        if self._groups or self._after_agent:
            return False
        return not self._open_group()

    def is_over(self, key: GroupKey) -> bool:
        """Of a group that was begun."""
        return key not in self._groups

    @property
    def live(self) -> int:
        """Attempts that are not stopped."""
        return len(self._before_agent) + len(self._with_agent) + len(self._after_agent)

    @property
    def with_agent(self) -> int:
        return len(self._with_agent)

    def next(self, now: float) -> Ticket | None:
        """An attempt that is to begin; None: not now."""
        self._release_delayed(now)
        if not (self._has_room() and self.breaker.may_start(now)):
            return None
        group = next((one for one in self._groups.values() if one.to_begin), None)
        if group is None and (group := self._open_group()) is None:
            return None
        ticket = Ticket(group.key, group.next_number)
        group.next_number += 1
        group.to_begin -= 1
        group.live.add(ticket)
        self._before_agent.add(ticket)
        self._starting.add(ticket)
        self.breaker.starting()
        self.counts.begun += 1
        return ticket

    def wake_at(self, now: float) -> float | None:
        """When `next` may say something else than now, if nothing happens until then."""
        moments = [at for at, _, _ in self._delayed[:1]]
        if (at := self.breaker.opens_at(now)) is not None:
            moments.append(at)
        return min(moments, default=None)

    def sandbox_tried(self, ticket: Ticket, came: bool, now: float) -> None:
        if ticket in self._starting:
            self._starting.discard(ticket)
            self.breaker.started(came, now)

    def agent_began(self, ticket: Ticket) -> None:
        self._before_agent.discard(ticket)
        self._with_agent.add(ticket)

    def agent_ended(self, ticket: Ticket) -> None:
        self._with_agent.discard(ticket)
        self._after_agent.add(ticket)

    def ended(self, ticket: Ticket, outcome: Outcome, now: float) -> Sequence[Ticket]:
        """The attempt has its outcome; others of its group are to be cut. A second end of the same
        attempt changes nothing."""
        group = self._groups.get(ticket.group)
        if group is None or ticket not in group.live:
            return ()
        group.live.discard(ticket)
        self._before_agent.discard(ticket)
        self._with_agent.discard(ticket)
        self._after_agent.add(ticket)
        self._give_up_start(ticket)
        self.counts.ended[outcome] += 1
        was_filled = group.is_filled
        self._count(group, outcome, now)
        cut: Sequence[Ticket] = ()
        if group.is_filled and not was_filled:
            group.to_begin = group.delayed = 0
            cut = sorted(group.live)
            self.counts.cut += len(cut)
        self._close_if_over(group)
        return cut

    def stopped(self, ticket: Ticket) -> None:
        """Nothing of the attempt is left: its sandbox has stopped."""
        self._after_agent.discard(ticket)

    def stop(self) -> Sequence[Ticket]:
        """Nothing begins any more; those that run."""
        self._source, self._stopping = None, True
        self._delayed.clear()
        for group in list(self._groups.values()):
            group.to_begin = group.delayed = 0
            self._close_if_over(group)
        return sorted(ticket for group in self._groups.values() for ticket in group.live)

    def _has_room(self) -> bool:
        settings = self._settings
        most = settings.agents + settings.ahead
        waiting = len(self._before_agent) + len(self._with_agent)
        # Attempts that are scored, or whose sandboxes stop, are bounded by another `agents`.
        return waiting < most and self.live < most + settings.agents

    def _open_group(self) -> _Group | None:
        """The next that has anything to do."""
        while self._source is not None:
            plan = next(self._source, None)
            if plan is None:
                self._source = None
                return None
            group = self._planned(plan)
            if group.to_begin > 0:
                self._groups[group.key] = group
                return group
            self.counts.groups += 1
            self.counts.filled += group.is_filled
        return None

    def _planned(self, plan: GroupPlan) -> _Group:
        assert plan.key not in self._groups, f"the group {plan.key} is there twice"
        wanted = self._settings.attempts
        group = _Group(plan.key, wanted, 0, next_number=len(plan.ended))
        group.scored = sum(outcome.scored for outcome in plan.ended)
        failed = sum(_is_failure(outcome) for outcome in plan.ended)
        group.broken = sum(outcome is Outcome.ENV_ERROR for outcome in plan.ended)
        group.given_up = self._is_hopeless(group)
        spare, budget = self._settings.over_sample, self._settings.retries * wanted
        group.replaced = min(max(0, failed - spare), budget)
        if not (group.is_filled or group.given_up):
            # Those that ended neither way were interrupted, replacements too: they are made again.
            group.to_begin = max(0, wanted + spare + group.replaced - group.scored - failed)
        return group

    def _count(self, group: _Group, outcome: Outcome, now: float) -> None:
        if outcome.scored:
            group.scored += 1
        elif _is_failure(outcome):
            group.broken += outcome is Outcome.ENV_ERROR
            if self._is_hopeless(group):
                group.given_up = True
                group.to_begin = group.delayed = 0
            elif (
                not self._stopping
                and group.expected < group.wanted
                and group.replaced < self._settings.retries * group.wanted
            ):
                self._replace(group, now)

    def _is_hopeless(self, group: _Group) -> bool:
        return not group.scored and group.broken > self._settings.retries

    def _replace(self, group: _Group, now: float) -> None:
        delay_s = self._settings.first_delay_s * 2 ** min(group.replaced, 30)
        delay_s = min(delay_s, self._settings.longest_delay_s) * self._rng.uniform(0.5, 1.5)
        group.replaced += 1
        group.delayed += 1
        self.counts.replaced += 1
        order = self.counts.replaced  # keys of equal moments are not compared
        heapq.heappush(self._delayed, (now + delay_s, order, group.key))

    def _release_delayed(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, _, key = heapq.heappop(self._delayed)
            group = self._groups.get(key)
            if group is not None and group.delayed:  # else it was filled or given up meanwhile
                group.delayed -= 1
                group.to_begin += 1

    def _give_up_start(self, ticket: Ticket) -> None:
        if ticket in self._starting:
            self._starting.discard(ticket)
            self.breaker.abandoned()

    def _close_if_over(self, group: _Group) -> None:
        if group.is_over:
            del self._groups[group.key]
            self.counts.groups += 1
            self.counts.filled += group.is_filled


def _is_failure(outcome: Outcome) -> bool:
    """Not the agent's doing, and nobody asked for it: it is made again."""
    return outcome in (Outcome.INFRA_ERROR, Outcome.ENV_ERROR)

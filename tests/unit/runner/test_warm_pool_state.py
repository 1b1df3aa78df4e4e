"""The warm pool's decisions: whatever happens in whatever order, its bounds hold and nobody is
forgotten."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tracegrad.runner.warm_pool_state import (
    Action,
    Close,
    Hand,
    Refuse,
    Start,
    WarmPoolState,
)

IDLE_S = 10.0
SPECS = st.sampled_from("abcd")


class Pools(RuleBasedStateMachine):
    """Beside the pool: what it was told to do, and what became of it."""

    @initialize(size=st.integers(1, 4), more=st.integers(0, 4))
    def begin(self, size: int, more: int) -> None:
        self.size, self.total = size, size + more
        self.pool: WarmPoolState[str, int, int] = WarmPoolState(
            size=size, total=self.total, idle_s=IDLE_S, comes_back=lambda spec: spec == "d"
        )
        self.now = 0.0
        self.number = 0
        self.starting: deque[str] = deque()
        self.spec_of: dict[int, str] = {}  # of items that exist
        self.ready: set[int] = set()
        self.used: set[int] = set()
        self.waiting: dict[int, str] = {}  # tickets, in the order of their asking
        self.drained = False

    def next(self) -> int:
        self.number += 1
        return self.number

    def do(self, actions: list[Action[str, int, int]]) -> None:
        for action in actions:
            match action:
                case Start(spec):
                    assert not self.drained
                    self.starting.append(spec)
                case Hand(ticket, item):
                    spec = self.waiting.pop(ticket)
                    assert spec == self.spec_of[item], "a sandbox of another spec"
                    assert item not in self.used, "handed out twice"
                    assert not any(t < ticket and s == spec for t, s in self.waiting.items())
                    self.ready.discard(item)
                    self.used.add(item)
                case Refuse(ticket, _):
                    del self.waiting[ticket]
                case Close(item):
                    assert item not in self.used, "closed while it is used"
                    self.ready.discard(item)
                    del self.spec_of[item]

    @rule(spec=SPECS)
    def ask(self, spec: str) -> None:
        ticket = self.next()
        self.waiting[ticket] = spec
        self.do(self.pool.asked(spec, ticket))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def start_succeeds(self, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from(sorted(set(self.starting))))
        self.starting.remove(spec)
        item = self.next()
        self.spec_of[item] = spec
        self.ready.add(item)
        self.do(self.pool.started(spec, item, self.now))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def start_fails(self, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from(sorted(set(self.starting))))
        self.starting.remove(spec)
        before = [ticket for ticket, other in self.waiting.items() if other == spec]
        self.do(self.pool.failed(spec, RuntimeError("no room")))
        if before:
            assert before[0] not in self.waiting, "who waits longest hears of it"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        self.do(self.pool.gave_up(self.waiting.pop(ticket), ticket))

    @precondition(lambda self: self.used)
    @rule(data=st.data(), reset=st.booleans())
    def end_of_use(self, data: st.DataObject, reset: bool) -> None:
        item = data.draw(st.sampled_from(sorted(self.used)))
        self.used.remove(item)
        if reset:
            self.ready.add(item)
            self.do(self.pool.returned(self.spec_of[item], item, self.now))
        else:
            del self.spec_of[item]

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.pool.time(self.now))

    @precondition(lambda self: not self.drained and self.number > 12)
    @rule()
    def drain(self) -> None:
        self.drained = True
        self.do(self.pool.drained(RuntimeError("the end")))
        assert not self.waiting
        assert not self.ready

    @invariant()
    def bounds_hold(self) -> None:
        counts = {
            spec: self.starting.count(spec) + sum(self.spec_of[i] == spec for i in self.ready)
            for spec in "abcd"
        }
        assert all(count <= self.size for count in counts.values())
        assert sum(counts.values()) <= self.total
        assert all(self.pool.held(spec) == count for spec, count in counts.items())

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        for spec in set(self.waiting.values()):
            assert not any(self.spec_of[item] == spec for item in self.ready)
            served = spec in self.starting
            full = len(self.starting) == self.total  # whoever starts next makes room
            assert served or full


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def pool(size: int = 2, total: int = 4) -> WarmPoolState[str, str, int]:
    return WarmPoolState(size=size, total=total, idle_s=IDLE_S)


def test_the_next_one_starts_while_the_first_is_used() -> None:
    found = pool(size=1)
    assert found.asked("a", 1) == [Start("a")]
    assert found.started("a", "first", 0.0) == [Hand(1, "first"), Start("a")]


def test_nothing_is_started_ahead_of_those_that_come_back() -> None:
    found: WarmPoolState[str, str, int] = WarmPoolState(
        size=2, total=4, idle_s=IDLE_S, comes_back=lambda spec: True
    )
    found.asked("a", 1)
    assert found.started("a", "only", 0.0) == [Hand(1, "only")]
    assert found.asked("a", 2) == [Start("a")]
    assert found.returned("a", "only", 0.0) == [Hand(2, "only")]
    assert found.started("a", "spare", 0.0) == []


def test_nothing_is_started_ahead_after_a_failure() -> None:
    found = pool()
    found.asked("a", 1)
    error = RuntimeError("no engine")
    assert found.failed("a", error) == [Refuse(1, error)]
    assert found.held() == 0


def test_what_nobody_takes_goes_and_is_not_replaced() -> None:
    found = pool(size=1)
    found.asked("a", 1)
    found.started("a", "used", 0.0)
    found.started("a", "spare", 1.0)
    assert found.time(1.0 + IDLE_S) == []
    assert found.time(1.1 + IDLE_S) == [Close("spare")]
    assert found.held() == 0


def test_a_spare_one_makes_room_for_who_waits_but_not_for_a_guess() -> None:
    found = pool(size=1, total=1)
    found.asked("a", 1)
    found.started("a", "used", 0.0)
    found.started("a", "spare", 0.0)
    assert found.asked("b", 2) == [Close("spare"), Start("b")]
    # The one that starts ahead for b is all that there is room for; a's next asker takes it.
    assert found.started("b", "other", 0.0) == [Hand(2, "other"), Start("b")]


def test_one_that_was_dead_costs_nobody_his_place() -> None:
    found = pool(size=1)
    found.asked("a", 1)
    found.asked("a", 2)
    assert found.started("a", "dead", 0.0)[0] == Hand(1, "dead")
    found.asked("a", 1, first=True)
    assert found.started("a", "living", 0.0)[0] == Hand(1, "living")


@pytest.mark.parametrize("late", [True, False])
def test_after_the_drain_nothing_is_kept(late: bool) -> None:
    found = pool(size=1)
    found.asked("a", 1)
    if late:
        found.drained(RuntimeError())
        assert found.started("a", "late", 0.0) == [Close("late")]
    else:
        found.started("a", "used", 0.0)
        found.drained(RuntimeError())
        assert found.returned("a", "used", 0.0) == [Close("used")]
    assert [type(action) for action in found.asked("a", 2)] == [Refuse]

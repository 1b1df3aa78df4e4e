"""First calls of rollouts wait for a place, in order, and are never refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from tracegrad.proxy.engine import intake_gate
from tracegrad.proxy.engine.intake_gate import IntakeGate
from tracegrad.store.errors import StoreUnavailable
from tracegrad.store.ledger.intake import IntakeState
from tracegrad.store.ledger.intake_capacity import Capacity


@dataclass
class FakeIntake:
    """`room` for so many; rollouts of `others` need no place."""

    room: int = 0
    others: set[str] = field(default_factory=set)
    placed: list[str] = field(default_factory=list)
    broken: bool = False

    def is_opened(self, rollout_id: str) -> bool:
        return True

    def needs_place(self, rollout_id: str) -> bool:
        return rollout_id not in self.others

    def begin(self, rollout_id: str, *, waited_s: float = 0.0) -> IntakeState:
        if self.broken:
            raise StoreUnavailable("the disk is full")
        if rollout_id in self.others:
            return IntakeState(paced=False, capacity=Capacity(None))
        if not self.room:
            return IntakeState(paced=True, capacity=Capacity(0, "in_flight", 1), reason="full")
        self.room -= 1
        self.placed.append(rollout_id)
        return IntakeState(paced=True, capacity=Capacity(self.room))


class Counted(dict[tuple[str, ...], float]):
    def add(self, name: str, *labels: str, number: float = 1.0) -> None:
        self[name, *labels] = self.get((name, *labels), 0.0) + number


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_gate, "_LOOK_S", 0.001)


def gate(intake: FakeIntake, counts: Counted, **limits: float) -> IntakeGate:
    given = {"max_waiting": 10, "max_wait_s": 60.0} | limits
    return IntakeGate(intake, counts, **given)  # type: ignore[arg-type]


async def waiting(gate: IntakeGate, number: int) -> None:
    async with asyncio.timeout(60):
        while gate.waiting != number:  # noqa: ASYNC110 (nobody says when a call waits)
            await asyncio.sleep(0)


async def test_rollouts_begin_in_the_order_in_which_they_came() -> None:
    intake, counts = FakeIntake(room=1), Counted()
    paced = gate(intake, counts)
    await paced.enter("a")
    tasks = []
    for number, name in enumerate(["b", "c", "d"], start=1):
        tasks.append(asyncio.create_task(paced.enter(name)))
        await waiting(paced, number)
    intake.room = 3
    await asyncio.gather(*tasks)
    assert intake.placed == ["a", "b", "c", "d"]
    assert counts["paced_rollouts_total", "placed"] == 4
    assert counts["intake_waited_seconds_total",] > 0


async def test_all_calls_of_a_rollout_that_begins_go_on() -> None:
    intake = FakeIntake()
    paced = gate(intake, Counted())
    calls = [asyncio.create_task(paced.enter("a")) for _ in range(3)]
    await waiting(paced, 3)
    intake.room = 1
    await asyncio.gather(*calls)
    await paced.enter("a")
    assert intake.placed == ["a"]


async def test_who_needs_no_place_does_not_wait_behind_those_who_do() -> None:
    intake = FakeIntake(others={"exam"})
    paced = gate(intake, Counted())
    held = asyncio.create_task(paced.enter("a"))
    await waiting(paced, 1)
    await paced.enter("exam")
    await paced.enter(None)
    assert not held.done()
    held.cancel()


async def test_after_its_time_a_rollout_is_let_in() -> None:
    counts = Counted()
    await gate(FakeIntake(), counts, max_wait_s=0.01).enter("a")
    assert counts == {("paced_rollouts_total", "let_in"): 1}


async def test_a_queue_without_room_lets_in_as_well() -> None:
    counts = Counted()
    paced = gate(FakeIntake(), counts, max_waiting=1)
    first = asyncio.create_task(paced.enter("a"))
    await waiting(paced, 1)
    await paced.enter("b")
    assert counts == {("paced_rollouts_total", "let_in"): 1}
    assert not first.done()
    first.cancel()


async def test_of_a_rollout_that_is_not_remembered_the_store_is_asked_again() -> None:
    intake = FakeIntake(room=3)
    paced = gate(intake, Counted(), remembered=1)
    for name in "aabba":
        await paced.enter(name)
    assert intake.placed == ["a", "b", "a"]


async def test_a_store_that_cannot_be_asked_holds_nobody_back() -> None:
    await gate(FakeIntake(broken=True), Counted()).enter("a")


async def test_a_client_that_leaves_is_not_waited_for() -> None:
    intake = FakeIntake()
    paced = gate(intake, Counted())
    gone, stays = (asyncio.create_task(paced.enter(name)) for name in "ab")
    await waiting(paced, 2)
    gone.cancel()
    intake.room = 2  # its ask may be under way
    await stays
    assert "b" in intake.placed
    assert paced.waiting == 0

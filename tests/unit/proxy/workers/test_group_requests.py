"""What one worker asks of all: who is waited for, and for how long."""

from __future__ import annotations

from tracegrad.events import Json
from tracegrad.proxy.engine.weight_gate import Canary
from tracegrad.proxy.workers.group_requests import ANSWER_S, LOOK_S, GateNow, GroupRequests

HOLD = {"ask": "hold", "args": {"ttl_s": 60.0, "drain_s": 2.0}, "number": 5}
STATE = {"ask": "state", "args": {}, "number": 6}


class Group:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Json]] = []
        self.requests = GroupRequests(lambda to, what: self.sent.append((to, what)), GateNow(4))

    def ask(self, message: Json, ready: list[int], starting: int = 9) -> None:
        self.requests.ask(0, message, all_=[*ready, starting], ready=ready, now=100.0)

    def answer(self, worker: int, number: int, result: int) -> None:
        self.requests.answered(worker, {"number": number, "result": result})

    def answers(self) -> list[Json]:
        return [what for _, what in self.sent if "answer" in what]


def test_all_that_serve_are_waited_for_and_one_that_starts_is_told() -> None:
    group = Group()
    group.ask(HOLD, [0, 1])
    assert [to for to, _ in group.sent] == [0, 1, 9]
    group.answer(0, 1, 3)
    group.answer(0, 1, 3)  # nobody counts twice
    group.answer(9, 1, 8)
    assert group.answers() == []
    group.answer(1, 1, 4)
    assert group.answers() == [{"answer": 5, "results": [3, 4]}]


def test_one_that_dies_is_not_waited_for() -> None:
    group = Group()
    group.ask(HOLD, [0, 1])
    group.answer(0, 1, 3)
    group.requests.gone(1)
    assert group.answers() == [{"answer": 5, "results": [3]}]


def test_one_that_does_not_do_as_it_must_is_named_and_one_that_only_looks_is_left_out() -> None:
    group = Group()
    group.ask(HOLD, [0, 1])
    group.ask(STATE, [0, 1])
    for number in (1, 2):
        group.answer(0, number, 3)
    assert group.requests.next_deadline() == 100.0 + LOOK_S
    assert group.requests.overdue(100.0 + LOOK_S) == set()
    assert group.answers() == [{"answer": 6, "results": [3]}]
    assert group.requests.overdue(100.0 + ANSWER_S) == set()
    assert group.requests.overdue(100.0 + ANSWER_S + 2.0) == {1}


def test_the_gate_that_a_new_worker_joins() -> None:
    group = Group()
    assert group.requests.gate == GateNow(4)
    group.ask(HOLD, [0])
    group.ask({"ask": "set_version", "args": {"version": 5}, "number": 7}, [0])
    gate = group.requests.gate
    assert (gate.version, gate.pushes) == (5, True)
    assert [gate.held_for(now) for now in (101.0, 160.0)] == [59.0, None]
    group.ask({"ask": "release", "args": {}, "number": 8}, [0])
    assert group.requests.gate.held_for(101.0) is None
    assert GateNow(0, held=True).held_for(1e9) == float("inf")


def test_a_worker_that_starts_joins_a_hold_that_only_a_version_ends() -> None:
    gate = GateNow(4, held=True, lacks_version=True)
    gate = gate.after("hold", {"ttl_s": 60, "drain_s": 1}, 100.0)
    assert gate.held_for(1_000.0) == float("inf")
    assert gate.runs_out_in(130.0) == 30.0
    in_time = gate.after("set_version", {"version": 5}, 130.0)
    assert [in_time.held_for(now) for now in (130.0, 161.0)] == [30.0, None]
    too_late = gate.after("set_version", {"version": 5}, 161.0)
    assert too_late.held_for(161.0) == float("inf"), "its time was over, and opened nothing"
    gate = gate.after("release", {}, 101.0)
    gate = gate.after("set_version", {"version": 5, "upstream": "a"}, 102.0)
    assert (gate.held, gate.held_for(1_000.0)) == (True, float("inf"))
    gate = gate.after("set_version", {"version": 5}, 103.0)
    assert (gate.held, gate.lacks_version) == (True, False)
    assert gate.after("release", {}, 104.0).held_for(104.0) is None


def test_a_worker_that_starts_joins_what_single_servers_have() -> None:
    gate = GateNow(4)
    gate = gate.after("hold", {"ttl_s": 60, "drain_s": 1, "upstream": "a"}, 100.0)
    gate = gate.after("set_version", {"version": 5, "upstream": "a"}, 100.0)
    gate = gate.after("set_canary", {"upstream": "a", "share": 0.1}, 100.0)
    assert gate == GateNow(
        4, pushes=True, versions=(("a", 5),), holds=(("a", 160.0),), canary=Canary("a", 0.1)
    )
    gate = gate.after("hold", {"ttl_s": 60, "drain_s": 1, "upstream": "b"}, 100.0)
    assert gate.after("release", {}, 101.0).holds == ()
    gate = gate.after("release", {"upstream": "a"}, 101.0)
    assert gate.holds == (("b", 160.0),)
    gate = gate.after("release", {"upstream": "b"}, 101.0)
    gate = gate.after("set_version", {"version": 7, "upstream": "b"}, 101.0)
    gate = gate.after("set_version", {"version": 6, "upstream": "a"}, 101.0)
    assert (gate.versions, gate.holds) == ((("b", 7), ("a", 6)), ())
    gate = gate.after("set_canary", {"upstream": None, "share": 0.0}, 102.0)
    assert gate.after("set_version", {"version": 6, "upstream": None}, 102.0) == GateNow(
        6, pushes=True
    )


def test_a_worker_that_starts_joins_a_candidates_name() -> None:
    gate = GateNow(4)
    gate = gate.after("set_canary", {"upstream": None, "share": 0.1, "model": "new"}, 100.0)
    gate = gate.after("set_version", {"version": 5, "upstream": None, "model": "new"}, 100.0)
    assert gate == GateNow(4, versions=(("new", 5),), canary=Canary(None, 0.1, "new"))
    gate = gate.after("set_canary", {"upstream": None, "share": 0.0, "model": None}, 101.0)
    assert gate == GateNow(4)

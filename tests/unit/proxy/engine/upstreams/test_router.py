"""Which server a rollout's calls go to."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tracegrad.proxy.engine.upstreams.router import MARGIN, UpstreamRouter, _Home
from tracegrad.proxy.engine.weight_gate import Canary
from tracegrad.proxy.shared_counts import SharedCounts
from tracegrad.proxy.shared_log import SharedLog


@dataclass(eq=False)
class Server:
    name: str
    up: bool = True
    in_flight: int = 0
    held: bool = False

    @property
    def url(self) -> str:
        return self.name

    @property
    def takes_calls(self) -> bool:
        return self.up and not self.held


def some(count: int) -> list[Server]:
    return [Server("ABCDEFGH"[number]) for number in range(count)]


def test_a_rollout_keeps_its_server() -> None:
    servers = some(3)
    placement = UpstreamRouter(servers)
    first = {f"r{n}": placement.choose(f"r{n}") for n in range(30)}
    for server in servers:
        server.in_flight = 5
    servers[1].in_flight = 0
    assert {rollout: placement.choose(rollout) for rollout in first} == first


def test_rollouts_are_spread_evenly_also_while_nothing_runs() -> None:
    placement = UpstreamRouter(some(4))
    counts = Counter(placement.choose(f"r{n}").name for n in range(40))  # type: ignore[union-attr]
    assert counts == {"A": 10, "B": 10, "C": 10, "D": 10}


def test_a_new_rollout_and_a_call_without_a_name_go_to_the_least_busy() -> None:
    servers = some(3)
    placement = UpstreamRouter(servers)
    for server, busy in zip(servers, (3, 1, 2), strict=True):
        server.in_flight = busy
    assert placement.choose("r1") is servers[1]
    assert placement.choose(None) is servers[1]
    servers[1].in_flight = 4
    assert placement.choose(None) is servers[2]
    assert placement.choose("r1") is servers[1]


def test_a_rollout_whose_server_is_down_moves_and_stays_there() -> None:
    servers = some(2)
    placement = UpstreamRouter(servers)
    home = placement.choose("r1")
    assert home is servers[0]
    servers[0].up = False
    assert placement.choose("r1") is servers[1]
    servers[0].up = True
    assert placement.choose("r1") is servers[1]


def test_a_rollout_that_did_not_call_meanwhile_returns() -> None:
    servers = some(2)
    placement = UpstreamRouter(servers)
    placement.choose("r1")
    servers[0].up = False
    placement.choose("r2")
    servers[0].up = True
    assert placement.choose("r1") is servers[0]


def test_rollouts_leave_a_server_that_is_far_busier() -> None:
    servers = some(2)
    placement = UpstreamRouter(servers)
    placement.choose("r1")
    servers[1].in_flight = 10
    servers[0].in_flight = 20 + MARGIN
    assert placement.choose("r1") is servers[0]
    servers[0].in_flight += 1
    assert placement.choose("r1") is servers[1]
    assert placement.choose("r1") is servers[1], "and do not come back at once"


def test_while_all_are_down_there_is_no_server() -> None:
    for count in (1, 2):
        servers = some(count)
        placement = UpstreamRouter(servers)
        placement.choose("r1")
        for server in servers:
            server.up = False
        assert placement.choose("r1") is None
        assert placement.choose(None) is None


def test_only_so_many_rollouts_are_remembered() -> None:
    servers = some(2)
    placement = UpstreamRouter(servers, remembered=4)
    for n in range(5):
        placement.choose(f"r{n}")
    servers[0].in_flight = 1
    assert placement.choose("r2") is servers[0], "the least recent was r0"
    assert placement.choose("r0") is servers[1], "forgotten, and placed anew"


@given(
    count=st.integers(2, 4),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 40))),
)
def test_the_counts_of_rollouts_are_those_of_the_homes(
    count: int, steps: list[tuple[int, int, int]]
) -> None:
    servers = some(count)
    placement = UpstreamRouter(servers, remembered=6)
    for rollout, number, busy in steps:
        server = servers[number % count]
        server.in_flight = busy
        server.up = busy % 7 != 0
        chosen = placement.choose(f"r{rollout}")
        assert (chosen is None) == (not any(server.up for server in servers))
        assert chosen is None or chosen.up
    homes = Counter(home.server for home in placement._homes.values())
    assert placement._rollouts == [homes[number] for number in range(count)]
    assert len(placement._homes) <= 6


def test_workers_send_a_rollout_to_one_server_and_count_each_others_calls() -> None:
    log, counts = SharedLog(2), SharedCounts(2, 2)
    theirs, said = UpstreamRouter(some(2), others=log), []
    log.subscribe("home", lambda *home: said.append(home))
    log.join(0)
    home = theirs.choose("r1")
    pid = os.fork()
    if pid == 0:  # the other worker
        log._own = None
        mine = UpstreamRouter(some(2), others=log)
        log.join(1)
        chosen = mine.choose("r1")
        counts.count(1, 1).add(3)
        os._exit(0 if chosen is not None and home is not None and chosen.name == home.name else 1)
    assert os.waitpid(pid, 0)[1] == 0
    log.catch_up()
    assert said == [], "it had nothing to tell: the home was known"
    calls = counts.count(1, 0)
    calls.add(1)
    assert calls.total() == 4
    counts.reset(1)
    assert calls.total() == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12), st.randoms())
def test_workers_agree_in_whatever_order_they_hear_of_each_other(
    moves: list[tuple[int, int]], order: random.Random
) -> None:
    """`moves`: which worker moves the rollout, one after another, and where to."""
    workers = [UpstreamRouter(some(2)) for _ in range(3)]
    for since, (worker, server) in enumerate(moves):
        workers[worker]._move("r1", _Home(since, server))
    for number, worker in enumerate(workers):
        rings = [
            [(since, server) for since, (by, server) in enumerate(moves) if by == other]
            for other in range(3)
            if other != number
        ]
        while any(rings):  # each worker's words in their order, among them any
            since, server = order.choice([ring for ring in rings if ring]).pop(0)
            worker._moved("r1", since, server)
        assert sum(worker._rollouts) == len(worker._homes)
    last = _Home(len(moves) - 1, moves[-1][1]) if moves else None
    assert {worker._homes.get("r1") for worker in workers} == {last}


def test_two_workers_that_place_a_rollout_at_once_agree() -> None:
    mine, theirs = UpstreamRouter(some(2)), UpstreamRouter(some(2))
    mine._move("r1", _Home(5.0, 1))
    theirs._move("r1", _Home(5.0, 0))
    mine._moved("r1", 5.0, 0)
    theirs._moved("r1", 5.0, 1)
    assert mine._homes["r1"] == theirs._homes["r1"] == _Home(5.0, 0)


def test_a_server_that_is_given_new_weights_gets_no_call() -> None:
    servers = some(2)
    placement = UpstreamRouter(servers)
    homes = {name: placement.choose(name) for name in "abcd"}
    servers[0].held = True
    assert {placement.choose(name) for name in "abcd"} == {servers[1]}
    servers[1].held = True
    assert placement.choose("a") is None
    servers[0].held = servers[1].held = False
    assert {placement.choose(name) for name in homes} == {servers[1]}, "their prefixes are there"


@given(st.integers(2, 5), st.integers(0, 4), st.floats(0, 1), st.lists(st.text(), max_size=30))
def test_a_canary_gets_its_share_of_rollouts_and_each_rollout_one_side(
    count: int, which: int, share: float, rollouts: list[str]
) -> None:
    servers = some(count)
    theirs = servers[which % count]
    canary = Canary(theirs.url, share)
    workers = [UpstreamRouter(servers, canary=lambda: canary) for _ in range(2)]
    for rollout in rollouts:
        chosen = {worker.choose(rollout) is theirs for worker in workers for _ in range(3)}
        assert chosen == {canary.has(rollout)}
    assert workers[0].choose(None) is not theirs


def test_the_canarys_share_is_about_what_was_asked_for() -> None:
    share = sum(Canary("A", 0.1).has(f"rollout-{n}") for n in range(10_000)) / 10_000
    assert 0.09 < share < 0.11
    assert not any(Canary("A", 0.0).has(f"{n}") for n in range(100))
    assert all(Canary("A", 1.0).has(f"{n}") for n in range(100))


def test_a_candidate_by_name_is_on_every_server() -> None:
    placement = UpstreamRouter(some(2), canary=lambda: Canary(None, 1.0, "candidate"))
    assert len({placement.choose(f"r{n}") for n in range(4)}) == 2


def test_without_its_own_side_a_rollout_goes_where_calls_are_taken() -> None:
    servers = some(2)
    canary: list[Canary | None] = [Canary("A", 1.0)]
    placement = UpstreamRouter(servers, canary=lambda: canary[0])
    assert placement.choose("r") is servers[0]
    servers[0].up = False
    assert placement.choose("r") is servers[1]
    servers[0].up = True
    assert placement.choose("r") is servers[0], "and back"
    canary[0] = Canary("A", 0.0)
    assert placement.choose("r") is servers[1]
    servers[1].up = False
    assert placement.choose("r") is servers[0], "late beats never"

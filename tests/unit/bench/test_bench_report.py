"""From rounds to a page: what is compared with what, and what counts as met."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.proxy.cells import Cell
from bench.proxy.endurance import Memory, Stored
from bench.proxy.goals import goals
from bench.proxy.machine import others
from bench.proxy.peers import DIRECT, LITELLM, OURS, PLAIN, litellm_version
from bench.proxy.report import page
from bench.proxy.rounds import Result, Round

FLAT = Memory(tuple((calls, 100 << 20) for calls in range(0, 20_001, 2_000)), ())
SMALL = Stored(30_000, (5_000, 5_100))


def one(p50: float, calls_per_s: float = 100, errors: tuple[str, ...] = (), cut: int = 0) -> Round:
    return Round(calls_per_s, p50, p50 * 2, p50 / 2, p50, 50, errors, cut, 1.0, 0.1, 0.1)


def result(cell: Cell, **rounds: list[Round]) -> Result:
    names = {"direct": DIRECT, "plain": PLAIN, "ours": OURS, "litellm": LITELLM}
    return Result(cell, {names[name]: found for name, found in rounds.items()})


def test_time_added_is_over_direct_in_the_same_round_and_the_median_of_rounds() -> None:
    # The machine was slow in the second round, for all alike.
    direct, ours = [one(1), one(100), one(2)], [one(2.5), one(101.5), one(9)]
    assert result(Cell(False, 8192, 1), direct=direct, ours=ours).added(OURS, "p50") == 1.5


@pytest.mark.parametrize(("p50", "met"), [(2.9, True), (3.1, False)])
def test_two_milliseconds_may_be_added_at_8k(p50: float, met: bool) -> None:
    found = goals([result(Cell(False, 8192, 1), direct=[one(1)], ours=[one(p50)])], FLAT, SMALL)
    assert [goal.met for goal in found if "added p50" in goal.what] == [met]


def test_throughput_is_held_against_both_peers() -> None:
    fast = result(
        Cell(False, 8192, 32),
        direct=[one(1)],
        plain=[one(1, 1000)],
        ours=[one(1, 710)],
        litellm=[one(1, 80)],
    )
    found = {goal.what: goal.met for goal in goals([fast], FLAT, SMALL)}
    assert found["calls/s over those of pass-through, whole 8192 tokens x32"] is True
    assert found["calls/s over those of LiteLLM, whole 8192 tokens x32"] is False


def test_few_callers_that_ask_for_tokens_are_held_against_the_pass_through() -> None:
    def verdict(cell: Cell, ours: Round) -> list[bool]:
        few = result(cell, direct=[one(1)], plain=[one(2, 100)], ours=[ours])
        return [goal.met for goal in goals([few], FLAT, SMALL) if "pass-through" in goal.what]

    slow, fast = Cell(False, 8192, 16, 100, tokens=True), Cell(False, 8192, 16, 650, tokens=True)
    assert (verdict(slow, one(3.9)), verdict(slow, one(4.1))) == ([True], [False])
    assert (verdict(fast, one(1, 81)), verdict(fast, one(1, 79))) == ([True], [False])
    stream = Cell(True, 8192, 16, 50, tokens=True)
    for cpu, met in ((1.4, True), (1.6, False)):
        assert verdict(stream, replace(one(1), server_cpu=cpu)) == [met]


def test_an_error_or_a_cut_among_a_thousand_streams_is_a_goal_missed() -> None:
    cell = Cell(True, 8192, 1000, rate=50)
    for rounds, met in (([one(1)], True), ([one(1, errors=("x",))], False), ([one(1, cut=1)], 0)):
        found = goals([result(cell, direct=[one(1)], ours=rounds)], FLAT, SMALL)
        assert [goal.met for goal in found if goal.what.startswith("errors")] == [bool(met)]


def test_memory_is_flat_when_the_second_half_is() -> None:
    def verdict(mib: list[int]) -> list[bool]:
        samples = tuple((at * 5_000, size << 20) for at, size in enumerate(mib))
        found = goals([], Memory(samples, ()), SMALL)
        return [goal.met for goal in found if "memory" in goal.what]

    assert verdict([100, 300, 400, 405, 410]) == [True]
    assert verdict([100, 300, 400, 450, 500]) == [False]
    assert verdict([100, 300]) == []  # too few calls to tell


def test_bytes_of_later_turns_must_not_grow() -> None:
    def verdict(stored: Stored) -> list[bool]:
        return [goal.met for goal in goals([], FLAT, stored) if goal.what.startswith("stored")]

    assert verdict(Stored(44_000, (5_000, 5_900))) == [True, True]
    assert verdict(Stored(46_000, (5_000, 6_100))) == [False, False]


def test_the_page_has_a_row_for_every_server_and_tells_errors() -> None:
    bad = one(9, errors=("status 500", "status 500"), cut=3)
    whole = result(Cell(False, 8192, 32), direct=[one(1)], ours=[bad])
    paced = result(Cell(True, 8192, 256, rate=50), direct=[one(1)], ours=[one(2)])
    text = page(
        made=["today"],
        machine=["a machine"],
        goals=goals([whole, paced], FLAT, SMALL),
        at_once=[whole],
        at_a_rate=[paced],
        with_tokens=[paced],
        memory=FLAT,
        stored=SMALL,
    )
    rows = [line for line in text.splitlines() if "| 8,192 | 32 | tracegrad |" in line]
    assert len(rows) == 1
    assert "+8.00" in rows[0]
    assert "2 x status 500; 3 not finished in time" in rows[0]
    assert "| streams, 50/s | 8,192 | 256 | tracegrad |" in text
    assert "| 20,000 | 100 |" in text
    assert "| 3 | 5.1 |" in text


def test_the_share_of_other_processes_is_of_all_cores() -> None:
    assert others(busy=10.0, ours=10.0, wall_s=10.0).startswith("other processes had 0%")
    assert others(busy=8.0, ours=10.0, wall_s=10.0).startswith("other processes had 0%")


def test_litellm_is_pinned_to_a_version_after_the_malicious_ones() -> None:
    assert tuple(map(int, litellm_version().split("."))) > (1, 82, 8)

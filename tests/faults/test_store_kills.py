"""Writers killed with SIGKILL at random moments: what they were told is stored is there, whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from support.store import postgres_server as postgres
from support.store.durability_check import check_durability, integrity
from support.store.kill_runs import (
    ForkServer,
    KillCounts,
    RandomKiller,
    all_at_once,
    drawn_seed,
    fork_servers,
)
from support.store.workload import Acknowledged, resume_points
from tracegrad.events import RolloutStarted
from tracegrad.store import Store

_SIDE_BY_SIDE = 2  # victims that write to one store at the same time
_AGENTS = 4  # threads of each
_TRANSACTIONS = 40  # after its first acknowledgement, at most
_LOOK_EVERY = 25
_MAKING_S = 0.25  # about as long as it takes to make a store's tables


def writers_killed(url: str, folder: Path, kills: int) -> None:
    """`kills` victims; what was lost is named."""
    seed = drawn_seed()
    told = [{f"{side}{n}": Acknowledged() for n in range(_AGENTS)} for side in range(_SIDE_BY_SIDE)]
    done = 0
    with fork_servers("write", url, folder, _SIDE_BY_SIDE) as found:
        killers = [
            _killer(range_, mine, seed, f"{seed}/{side}")
            for side, (range_, mine) in enumerate(zip(found, told, strict=True))
        ]
        while done < kills:
            some = min(kills - done, _LOOK_EVERY)
            all_at_once(
                [partial(killers[0].kill, some // 2), partial(killers[1].kill, -(-some // 2))]
            )
            done += some
            with Store.open(url) as store:
                now = check_durability(store, seed, told[0] | told[1])
            lost = f"after {done} kills: {len(now.faults)} faults\n" + "\n".join(now.faults[:20])
            assert not now.faults, lost
    toll = KillCounts.of(killers)
    print(f"{toll}; {now.turns} turns, {now.acknowledged} submissions told and kept,")
    print(f"{now.unacknowledged['whole']} kept that nobody was told of")
    toll.check(kills)
    assert now.acknowledged >= kills, "the victims wrote next to nothing"


def _killer(
    range_: ForkServer, told: dict[str, Acknowledged], seed: str, own_seed: str
) -> RandomKiller:
    draw = random.Random(own_seed)
    return RandomKiller(
        range_, draw, _next(told, seed, draw), _hears(told), transactions=_TRANSACTIONS
    )


def _next(
    told: dict[str, Acknowledged], seed: str, draw: random.Random
) -> Callable[[], dict[str, Any]]:
    def order() -> dict[str, Any]:
        for each in told.values():
            if draw.random() < 0.3:
                each.give_up()
        return {"seed": seed, "agents": resume_points(told)}

    return order


def _hears(told: dict[str, Acknowledged]) -> Callable[[list[Any]], None]:
    def hear(said: list[Any]) -> None:
        match said:
            case ["ack", agent, number, wave, index]:
                told[agent].add((number, wave, index))
            case _:
                raise AssertionError(f"a victim was refused: {said}")

    return hear


@pytest.mark.parametrize(("url", "kills"), [("sqlite", 40), ("postgres", 20)], indirect=["url"])
def test_kills_of_writers_lose_nothing(url: str, kills: int, tmp_path: Path) -> None:
    writers_killed(url, tmp_path, kills)


def makers_killed(new_url: Callable[[], str], folder: Path, kills: int) -> None:
    draw = random.Random(drawn_seed())
    made, longest = 0, _MAKING_S
    with fork_servers("make", new_url(), folder, 1) as [range_]:
        for _ in range(kills):
            url, said = new_url(), list[Any]()
            moment = {"wait_s": draw.uniform(0, longest)}
            status, _ = range_.one({"url": url, "kill": moment}, said.append)
            assert status == -9, range_.log()
            # Near the end of the making, however fast this machine is.
            longest *= 0.6 if ["made"] in said else 1.3
            made += ["made"] in said
            with Store.open(url) as store:
                store.append([RolloutStarted(rollout_id="r")])
                assert [row.rollout_id for row in store.rollouts()] == ["r"], url
                assert integrity(store) == [], url
    print(f"{made} of {kills} were made before the kill")
    assert made < kills, "every one was made before the kill"


def test_a_store_whose_making_was_killed_is_made_by_the_next_in_sqlite(tmp_path: Path) -> None:
    numbers = count()
    makers_killed(lambda: f"sqlite:///{tmp_path}/{next(numbers)}.db", tmp_path, kills=10)


def test_a_store_whose_making_was_killed_is_made_by_the_next_in_postgresql(
    postgres_server: postgres.Server, tmp_path: Path
) -> None:
    made: list[str] = []

    def new_url() -> str:
        made.append(postgres_server.new_database())
        return made[-1]

    makers_killed(new_url, tmp_path, kills=5)
    for url in made:
        postgres_server.drop(url)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_1000_kills_of_writers_lose_nothing(url: str, tmp_path: Path) -> None:
    writers_killed(url, tmp_path, kills=1000)

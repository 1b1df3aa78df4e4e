"""Several processes at once on one store: nothing is lost, nothing happens twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import TypeVar

from support.store.events import chain, make_turn, rollout_events
from tracegrad.events import Event, Turn
from tracegrad.store import (
    AlreadyTrained,
    GroupCommitWriter,
    LeaseLost,
    Ledger,
    StepRecord,
    Store,
    TurnCounts,
    lease_by_rollout,
)

T = TypeVar("T")

PROCESSES = 4
# Forks of a process that loads Python and SQLAlchemy once, and has no thread. A fork of the tests'
# own process has the locks of whatever thread of another test held one.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_barrier: Barrier


def at_once(work: Callable[[str, int], T], url: str) -> list[T]:
    """What each process returned; they begin together, and each has a number."""
    barrier = _CONTEXT.Barrier(PROCESSES)
    with ProcessPoolExecutor(PROCESSES, _CONTEXT, _begin, (barrier,)) as pool:
        return list(pool.map(_one, repeat(work), repeat(url), range(PROCESSES), timeout=100))


def _begin(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _one(work: Callable[[str, int], T], url: str, number: int) -> T:
    _barrier.wait(60)
    return work(url, number)


def open_it(url: str, number: int) -> None:
    with Store.open(url) as store:
        store.append([make_turn(f"t{number}", f"r{number}")])


def test_processes_that_open_a_new_store_at_once_all_succeed(empty_url: str) -> None:
    at_once(open_it, empty_url)  # who waits until a lock times out is refused
    with Store.open(empty_url, create=False) as store:
        assert len(store.rollouts()) == PROCESSES


def write(url: str, number: int) -> None:
    """Conversations of its own, rollouts that others write to, whole rollouts in one batch."""
    with Store.open(url) as store, GroupCommitWriter(store) as writer:

        def agent(thread: int) -> None:
            parent = None
            for n in range(10):
                own = f"own{number}{thread}"
                parent = make_turn(f"{own}.{n}", own, parent=parent, new=range(200))
                shared = f"shared{(n + number) % 3}"
                name = f"whole{number}{thread}.{n}"
                for events in (
                    [parent],
                    [make_turn(f"{shared}.{number}{thread}.{n}", shared)],
                    rollout_events(name, tags={"n": str(n)}, turns=3),
                ):
                    writer.submit(events).result(timeout=60)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(agent, range(3)))


def test_processes_and_threads_that_write_at_once_lose_no_turn(url: str) -> None:
    at_once(write, url)
    with Store.open(url) as store:
        assert store.turn_counts().captured == PROCESSES * 3 * 10 * 5
        for agent in (f"{number}{thread}" for number in range(PROCESSES) for thread in range(3)):
            own = [turn.turn_id for turn in store.rollout_turns(f"own{agent}")]
            assert own == [f"own{agent}.{n}" for n in range(10)]
            for n in range(10):
                row = store.rollout(f"whole{agent}.{n}").summary
                assert (row.turns, row.tags) == (3, {"n": str(n)})
        shared = {turn.turn_id for n in range(3) for turn in store.rollout_turns(f"shared{n}")}
        assert len(shared) == PROCESSES * 3 * 10


def conversation(name: str) -> list[Turn]:
    request = [{"messages": [{"content": "x" * 300}] * (n + 1)} for n in range(12)]
    return chain(name, 12, created_at=1.0, request=request.__getitem__)


def repeat_each_other(url: str, number: int) -> None:
    """The same conversations from each, in batches of different sizes and orders."""
    draw = random.Random(number)
    left: list[list[Event]] = []
    for name in "abc":
        tags = {"who": str(number), str(number): "me"}
        left.append([*rollout_events(name, turns=0, tags=tags), *conversation(name)])
    with Store.open(url) as store:
        while any(left):
            events: list[Event] = []
            for rest in draw.sample(left, 3):
                size = draw.choice([1, 2, 7])
                events += rest[:size]
                del rest[:size]
            for _ in range(draw.choice([1, 1, 2])):
                store.append(events)


def test_processes_that_repeat_each_other_store_everything_once(url: str) -> None:
    at_once(repeat_each_other, url)
    with Store.open(url) as store:
        for name in "abc":
            assert store.rollout_turns(name) == conversation(name)
            tags = store.rollout(name).summary.tags
            who = tags["who"]
            assert tags == {"who": who, who: "me"}, "the tags of one opening"
            assert len(store.rewards(name)) == PROCESSES, "each sender's own"
            assert len(store.outcomes(name)) == 1


@dataclass(slots=True)
class Trained:
    leases: list[tuple[str, str]] = field(default_factory=list)  # lease, rollout
    turns: list[str] = field(default_factory=list)
    refused: int = 0


def train(url: str, number: int) -> Trained:
    """Leases, and commits a step, until nothing is left. The odd ones outlive some of their
    leases, so that others have the same turns."""
    done, step, idle = Trained(), 1000 * number, 0
    with Store.open(url) as store:
        ledger = Ledger(store)
        while idle < 4:
            step += 1
            late = number % 2 == 1 and step % 3 == 0
            ttl_s = 0.02 if late else 60.0
            groups = ledger.lease(groups=1, group_size=2, owner=f"p{number}", ttl_s=ttl_s)
            if not groups:
                idle += 1
                time.sleep(0.05)
                continue
            [group] = groups
            rollouts = [rollout.rollout_id for rollout in group.rollouts]
            turns = [turn.turn_id for rollout in group.rollouts for turn in rollout.turns]
            done.leases += [(group.lease_id, rollout) for rollout in rollouts]
            if late:
                time.sleep(0.05)
            if step % 7 == 6:
                ledger.release(groups)
                continue
            try:
                ledger.commit_step(
                    StepRecord(step=step, version=step),
                    trained=turns[1:],
                    skipped={turns[0]: "greedy"},
                    rollouts=rollouts,
                    leases=lease_by_rollout(groups),
                )
                done.turns += turns[1:]
            except (AlreadyTrained, LeaseLost):
                done.refused += 1
    return done


def test_processes_that_lease_and_commit_at_once_train_every_turn_once(url: str) -> None:
    names = [f"t{task}.{n}" for task in range(20) for n in range(2)]
    with Store.open(url) as store:
        for name in names:
            store.append(rollout_events(name, task=name.partition(".")[0], turns=3))
    done = at_once(train, url)
    with Store.open(url) as store:
        assert store.turn_counts() == TurnCounts(120, 100, {"greedy": 20}, {})
        trained = Counter(turn for each in done for turn in each.turns)
        assert set(trained.values()) == {1}
        fates = [fate for name in names for fate in store.rollout(name).dispositions.items()]
        assert {turn for turn, fate in fates if fate.step is not None} == set(trained)
        steps = {step.step for step in Ledger(store).steps()}
        assert {fate.step for _, fate in fates} - {None} == steps
        _check_leases(Ledger(store), names, [lease for each in done for lease in each.leases])


def _check_leases(ledger: Ledger, names: Sequence[str], reported: list[tuple[str, str]]) -> None:
    """The history knows every lease and no other, and none of a rollout's overlap."""
    kept = [(lease.lease_id, name) for name in names for lease in ledger.leases(name)]
    assert sorted(kept) == sorted(reported)
    for name in names:
        for earlier, later in pairwise(ledger.leases(name)):
            ended = min(earlier.leased_until, earlier.released_at or earlier.leased_until)
            assert ended <= later.leased_at


def lease_only(url: str, number: int, *, groups: int) -> list[str]:
    with Store.open(url) as store:
        ledger, mine = Ledger(store), list[str]()
        while found := ledger.lease(
            groups=groups, group_size=2, owner=str(number), ttl_s=600, at_least=1
        ):
            mine += [rollout.rollout_id for group in found for rollout in group.rollouts]
    return mine


def test_processes_never_lease_the_same_rollout(url: str) -> None:
    names = {f"t{task}.{n}" for task in range(16) for n in range(4)}
    with Store.open(url) as store:
        for name in sorted(names):
            store.append(rollout_events(name, task=name.partition(".")[0], turns=1))
    leased = [name for mine in at_once(partial(lease_only, groups=3), url) for name in mine]
    assert sorted(leased) == sorted(names)

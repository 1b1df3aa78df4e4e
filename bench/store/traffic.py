"""Turns in and out: many threads of one process, each waiting for its own."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from bench.proxy.rounds import percentile
from bench.store.places import Place
from bench.store.rollouts import Rollout, Shape, rollout
from tracegrad.events import Event
from tracegrad.store import GroupCommitWriter, Store


@dataclass(frozen=True, slots=True)
class Rate:
    """Milliseconds: what a caller waited for, and what the process worked for a turn."""

    turns_per_s: float
    p50_ms: float
    p95_ms: float
    cpu_ms: float

    @classmethod
    def median(cls, rates: Sequence[Rate]) -> Rate:
        columns = zip(*((r.turns_per_s, r.p50_ms, r.p95_ms, r.cpu_ms) for r in rates), strict=True)
        return cls(*map(statistics.median, columns))


@dataclass(frozen=True, slots=True)
class Cell:
    """`rollouts`: that each of the writers writes, one after another, in a round."""

    shape: Shape
    threads: int
    rollouts: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of all rounds the medians. Rollouts are read whole; `lean`: without requests, responses."""

    place: str
    cell: Cell
    written: Rate
    read: Rate
    lean: Rate


def traffic(place: Place, cell: Cell) -> Traffic:
    """A new store for each round."""
    written, read, lean = [], [], []
    for _ in range(cell.rounds):
        number = count()
        work = [
            [rollout(cell.shape, next(number)) for _ in range(cell.rollouts)]
            for _ in range(cell.threads)
        ]
        ids = [[one.opened.rollout_id for one in some] for some in work]
        with place.store() as store:
            with GroupCommitWriter(store) as writer:
                written.append(_measure([_writing(writer, some) for some in work]))
            read.append(_measure([_reading(store, some, raw=True) for some in ids]))
            lean.append(_measure([_reading(store, some, raw=False) for some in ids]))
    return Traffic(place.name, cell, *map(Rate.median, (written, read, lean)))


# Does its work; returns turns, and the seconds that each wait took.
_Work = Callable[[], tuple[int, list[float]]]


def _writing(writer: GroupCommitWriter, rollouts: Sequence[Rollout]) -> _Work:
    def work() -> tuple[int, list[float]]:
        waits = []
        for one in rollouts:
            for at, turn in enumerate(one.turns):
                events: list[Event] = [turn] if at else [one.opened, turn]
                start = time.perf_counter()
                writer.submit(events).result()
                waits.append(time.perf_counter() - start)
        return len(waits), waits

    return work


def _reading(store: Store, rollout_ids: Sequence[str], *, raw: bool) -> _Work:
    def work() -> tuple[int, list[float]]:
        turns, waits = 0, []
        for rollout_id in rollout_ids:
            start = time.perf_counter()
            turns += len(store.rollout_turns(rollout_id, raw=raw))
            waits.append(time.perf_counter() - start)
        return turns, waits

    return work


def _measure(works: Sequence[_Work]) -> Rate:
    """All at once, a thread each."""
    # Scripts and rollouts are the benchmark's own: the collector need not walk them.
    gc.collect()
    gc.freeze()
    gate = threading.Barrier(len(works) + 1)
    done: list[tuple[int, list[float]]] = []

    def run(work: _Work) -> None:
        gate.wait()
        done.append(work())

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    gate.wait()
    start, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert len(done) == len(works), "a thread failed; what it raised stands above"
    turns = sum(count for count, _ in done)
    waits = [wait for _, some in done for wait in some]
    p50, p95 = percentile(waits, 50), percentile(waits, 95)
    assert p50 is not None
    assert p95 is not None
    return Rate(turns / wall, p50, p95, cpu / turns * 1e3)

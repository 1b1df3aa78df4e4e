"""PostgreSQL killed under its writers: they are refused meanwhile, and go on; nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.proxy.servers import eventually
from support.store.durability_check import check_durability
from support.store.kill_runs import drawn_seed
from support.store.postgres_crash import Crashing, crashing
from support.store.workload import Acknowledged, Submission, WriterAgents
from tracegrad.store import GroupCommitWriter, Store, StoreUnavailable

_AGENTS = 8


class _Heard:
    """What agents were told, and how often they were refused."""

    def __init__(self) -> None:
        self.told = {f"a{number}": Acknowledged() for number in range(_AGENTS)}
        self.acknowledged = 0
        self.refusals: list[str] = []
        self._lock = threading.Lock()

    def tell(self, parcel: Submission) -> None:
        with self._lock:
            self.told[parcel.agent].add(parcel.place)
            self.acknowledged += 1

    def refused(self, error: StoreUnavailable) -> None:
        with self._lock:
            self.refusals.append(str(error))

    def goes_on(self, agents: WriterAgents) -> None:
        """Until every agent has got further from here, or one has come to its end."""
        before = {name: len(each.places) for name, each in self.told.items()}

        def further() -> bool:
            all_are = all(len(each.places) > before[name] for name, each in self.told.items())
            return all_are or bool(agents.failures)

        eventually(further, 60)


@contextmanager
def at_work(database: Crashing, seed: str) -> Iterator[tuple[Store, _Heard, WriterAgents]]:
    """Agents that write until the end; then what they were told is looked up."""
    heard = _Heard()
    with Store.open(database.server.new_database()) as store, GroupCommitWriter(store) as writer:
        agents = WriterAgents(writer, seed, heard.tell, heard.refused)
        threads = agents.start(dict.fromkeys(heard.told, (0, 0)))
        try:
            heard.goes_on(agents)
            yield store, heard, agents
            heard.goes_on(agents)
        finally:
            agents.over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"agent {thread.name} hangs"
        found = check_durability(store, seed, heard.told)
    print(f"{heard.acknowledged} told, {len(heard.refusals)} refused, {found.turns} turns")
    assert not found.faults, f"{len(found.faults)} faults\n" + "\n".join(found.faults[:20])
    assert not agents.failures
    assert all("\n" not in refusal for refusal in heard.refusals), "one line each"


def killed(database: Crashing, times: int) -> None:
    seed = drawn_seed()
    draw = random.Random(seed)
    with at_work(database, seed) as (store, heard, agents):
        for _ in range(times):
            heard.goes_on(agents)
            time.sleep(draw.uniform(0, 0.3))
            database.kill()
            before = len(heard.refusals)
            # While it is gone: nobody waits for its return.
            eventually(lambda seen=before: len(heard.refusals) >= seen + _AGENTS, 60)
            with pytest.raises(StoreUnavailable):
                store.rollouts()
            database.start()


def test_a_killed_server_loses_nothing_and_writers_go_on_by_themselves() -> None:
    with crashing(durable=True) as database:
        killed(database, times=6)


def test_nor_does_one_that_by_itself_would_acknowledge_before_it_flushes() -> None:
    """`synchronous_commit=off`, which the store does not leave as it is."""
    with crashing(durable=False) as database:
        killed(database, times=3)


def test_connections_that_are_cut_lose_nothing() -> None:
    seed = drawn_seed()
    draw = random.Random(seed)
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'tracegrad'"
    )
    with crashing(durable=True) as database, at_work(database, seed) as (_, heard, agents):
        for _ in range(20):
            heard.goes_on(agents)
            time.sleep(draw.uniform(0, 0.05))
            database.server.say(cut)

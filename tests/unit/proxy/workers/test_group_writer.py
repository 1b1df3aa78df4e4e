"""One process writes an SQLite store for all workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from support.proxy.servers import eventually
from support.proxy.workers import Workers, exists, two_workers
from tracegrad.proxy.store_writer.child import PROCESS_NAME


@pytest.fixture
def workers(sqlite_url: str, tmp_path: Path) -> Iterator[Workers]:
    with two_workers(sqlite_url, tmp_path) as found:
        yield found


@pytest.fixture
def often() -> dict[str, float]:
    """Looks at the writer that come often, and enough of them for a busy machine."""
    module = "tracegrad.proxy.store_writer.client"
    return {f"{module}.LOOK_EVERY_S": 0.1, f"{module}.MISSED_LOOKS": 50}


def turns_of_both(workers: Workers, rollout: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        for client in workers.clients:
            pool.submit(workers.chat, client, [{"role": "user", "content": "hi"}], rollout).result()


def test_workers_have_one_writer_and_it_has_a_name(workers: Workers) -> None:
    turns_of_both(workers, "r")
    assert psutil.Process(workers.writer()).name() == PROCESS_NAME
    assert len(workers.processes()) == 3
    assert len(workers.store.rollout_turns("r")) == 2


def test_of_a_server_each_has_its_own(postgres_url: str, tmp_path: Path) -> None:
    with two_workers(postgres_url, tmp_path) as workers:
        turns_of_both(workers, "r")
        for pid in workers.pids():
            [writer] = psutil.Process(pid).children()
            assert writer.name() == PROCESS_NAME
        assert len(workers.store.rollout_turns("r")) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 6])
def test_a_writer_that_ends_is_started_again_for_all(workers: Workers, number: int) -> None:
    turns_of_both(workers, "r")
    for rollout in ("s", "t"):
        killed = workers.writer()
        os.kill(killed, number)
        turns_of_both(workers, rollout)
        assert workers.writer() != killed
        assert len(workers.store.rollout_turns(rollout)) == 2
    said = workers.proxy.log.read_text()
    assert f"the store's writer (process {killed}) was ended by " in said
    assert said.count("it is started again") == 2


def test_a_writer_that_hangs_is_killed(
    sqlite_url: str, tmp_path: Path, often: dict[str, float]
) -> None:
    with two_workers(sqlite_url, tmp_path, often) as workers:
        turns_of_both(workers, "r")
        hung = workers.writer()
        os.kill(hung, signal.SIGSTOP)
        turns_of_both(workers, "s")
        assert not exists(hung)
        assert len(workers.store.rollout_turns("s")) == 2
        assert f"the store's writer (process {hung}) does nothing" in workers.proxy.log.read_text()


def test_a_worker_that_is_started_again_writes_by_the_same(workers: Workers) -> None:
    writer = workers.writer()
    killed = workers.pid_of(workers.clients[0])
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: killed not in (found := workers.pids()) and len(found) == 2, 60)
    for _ in range(2):
        turns_of_both(workers, "r")
    assert workers.writer() == writer
    assert len(workers.store.rollout_turns("r")) == 4


def test_a_worker_that_the_writer_had_no_file_for_is_connected_later(workers: Workers) -> None:
    turns_of_both(workers, "r")
    writer = psutil.Process(workers.writer())
    before = writer.rlimit(psutil.RLIMIT_NOFILE)
    killed = workers.pid_of(workers.clients[0])
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: killed not in (found := workers.pids()) and len(found) == 2, 60)
    writer.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))  # what is open already stays so
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(turns_of_both, workers, "s")
        eventually(lambda: "no file left for a worker" in workers.proxy.log.read_text(), 60)
        writer.rlimit(psutil.RLIMIT_NOFILE, before)
        done.result()
    assert len(workers.store.rollout_turns("s")) == 2
    assert workers.writer() == writer.pid


@pytest.mark.parametrize("used", [True, False])
def test_a_stopped_writer_does_not_outlive_its_proxy(workers: Workers, used: bool) -> None:
    """It may hold the store's lock."""
    if used:
        turns_of_both(workers, "r")
    everyone = workers.processes()
    os.kill(workers.writer(), signal.SIGSTOP)
    os.kill(workers.proxy.pid, signal.SIGKILL)
    eventually(lambda: not any(map(exists, everyone)), 60)


def test_a_hung_writer_holds_up_no_end_and_costs_nothing(sqlite_url: str, tmp_path: Path) -> None:
    """Workers write at their end what it had not."""
    constants = {"tracegrad.proxy.store_writer.client._END_S": 0.5}
    with two_workers(sqlite_url, tmp_path, constants) as workers:
        turns_of_both(workers, "r")
        everyone = [*workers.processes(), workers.proxy.pid]
        os.kill(workers.writer(), signal.SIGSTOP)
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(workers.chat, client, [{"role": "user", "content": "bye"}], "s")
                for client in workers.clients
            ]
            eventually(lambda: workers.health()["writer"]["submissions"] == 2, 60)
            os.kill(workers.proxy.pid, signal.SIGTERM)
            eventually(lambda: not any(map(exists, everyone)), 60)
            assert all(call.exception() is not None for call in calls)
        assert len(workers.store.rollout_turns("s")) == 2

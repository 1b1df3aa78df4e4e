"""The proxy, one of its workers or the process that writes for it, killed with SIGKILL while agents
call it: what they saw the end of is in the store."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from support.agents.conversation_load import ConversationLoad, lost_calls
from support.engines.mock_engine import MockEngine
from support.proxy.proxy_process import ProxyProcess
from support.proxy.servers import eventually, serving
from support.store.durability_check import integrity
from support.store.kill_runs import drawn_seed
from tracegrad.proxy.store_writer.child import PROCESS_NAME
from tracegrad.store import Store

_CALLERS = 6
_WITHIN_S = 0.5


@pytest.fixture
def engine_url() -> Iterator[str]:
    with serving(MockEngine().app(), lifespan="off") as url:
        yield url


@pytest.mark.parametrize(("url", "kills"), [("sqlite", 8), ("postgres", 4)], indirect=["url"])
def test_a_killed_proxy_loses_no_call_that_a_client_saw_end(
    engine_url: str, url: str, tmp_path: Path, kills: int
) -> None:
    draw = random.Random(drawn_seed())
    proxy = ProxyProcess(engine_url, url, tmp_path / "proxy.log")
    proxy.start()
    try:
        with ConversationLoad(proxy.url, _CALLERS) as callers:
            for _ in range(kills):
                before = len(callers.ended)
                eventually(lambda seen=before: len(callers.ended) > seen, 60)
                time.sleep(draw.uniform(0, _WITHIN_S))
                proxy.kill()
                proxy.start()
            before = len(callers.ended)
            eventually(lambda: len(callers.ended) > before, 60)
    finally:
        proxy.close()
    with Store.open(url) as store:
        faults = [*lost_calls(store, callers), *integrity(store)]
        captured = store.turn_counts().captured
    print(f"{kills} kills: {len(callers.ended)} calls and {len(callers.rewarded)} rewards ended,")
    print(f"{len(callers.failed)} failed; {captured} turns are stored")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])
    assert {each.status for each in callers.failed} == {None}, "the only fault was that it was gone"
    # Nobody saw the end of what was committed right before a kill.
    assert len(callers.ended) <= captured <= len(callers.ended) + kills * _CALLERS


def test_a_killed_worker_loses_nothing_and_the_others_go_on(
    engine_url: str, url: str, tmp_path: Path
) -> None:
    kills, draw = 4, random.Random(drawn_seed())
    proxy = ProxyProcess(engine_url, url, tmp_path / "proxy.log", workers=2)
    proxy.start()
    try:
        with ConversationLoad(proxy.url, _CALLERS) as callers:
            for _ in range(kills):
                before = len(callers.ended)
                eventually(lambda seen=before: len(callers.ended) > seen, 60)
                time.sleep(draw.uniform(0, _WITHIN_S))
                workers = both(proxy)
                os.kill(draw.choice(workers), signal.SIGKILL)
            both(proxy)
    finally:
        end(proxy)
    with Store.open(url) as store:
        faults = [*lost_calls(store, callers), *integrity(store)]
        captured = store.turn_counts().captured
    print(f"{kills} kills: {len(callers.ended)} calls ended, {len(callers.failed)} failed")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])
    assert {each.status for each in callers.failed} <= {None}
    assert len(callers.failed) <= kills * _CALLERS, "those who were connected to another go on"
    assert len(callers.ended) <= captured <= len(callers.ended) + kills * _CALLERS


@pytest.mark.parametrize(("url", "workers"), [("sqlite", 2), ("postgres", 2)], indirect=["url"])
def test_a_killed_writer_costs_no_call(
    engine_url: str, url: str, tmp_path: Path, workers: int
) -> None:
    kills, draw = 3, random.Random(drawn_seed())
    proxy = ProxyProcess(engine_url, url, tmp_path / "proxy.log", workers=workers)
    proxy.start()
    try:
        with ConversationLoad(proxy.url, _CALLERS) as callers:
            for number in range(1, kills + 1):
                before = len(callers.ended)
                eventually(lambda seen=before: len(callers.ended) > seen + _CALLERS, 60)
                time.sleep(draw.uniform(0, _WITHIN_S))
                os.kill(draw.choice(writers(proxy)), signal.SIGKILL)
                eventually(lambda n=number: started_again(proxy) == n, 60)
            before = len(callers.ended)
            eventually(lambda: len(callers.ended) > before + _CALLERS, 60)
    finally:
        end(proxy)
    with Store.open(url) as store:
        faults = [*lost_calls(store, callers), *integrity(store)]
        counts = store.turn_counts()
    print(f"{kills} kills: {len(callers.ended)} calls ended, {counts.captured} turns are stored")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])
    assert not callers.failed, "clients wait for the next writer, and notice nothing"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_proxy_that_is_ended_writes_what_it_was_given(
    engine_url: str, sqlite_url: str, tmp_path: Path, workers: int
) -> None:
    """The store is locked until its calls have been cut off."""
    proxy = ProxyProcess(engine_url, sqlite_url, tmp_path / "proxy.log", workers=workers)
    proxy.start()
    wanted = [f"r{number}" for number in range(8)]

    def finish(rollout_id: str) -> int | None:
        event = {"type": "rollout_finished", "rollout_id": rollout_id}
        try:
            answer = httpx.post(f"{proxy.url}/api/events", json={"events": [event]}, timeout=60)
        except httpx.TransportError:
            return None
        return answer.status_code

    def waiting() -> int:
        state = httpx.get(f"{proxy.url}/healthz", timeout=20).json()
        submissions: int = state["writer"]["submissions"]
        return submissions

    locked = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    try:
        locked.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(len(wanted)) as pool:
            answers = [pool.submit(finish, rollout_id) for rollout_id in wanted]
            eventually(lambda: waiting() == len(wanted), 60)
            os.kill(proxy.pid, signal.SIGTERM)
            assert {answer.result() for answer in answers} <= {None, 500, 503}
        locked.execute("ROLLBACK")
        eventually(lambda: not proxy.runs, 60)
    finally:
        locked.close()
        proxy.close()
    with Store.open(sqlite_url) as store:
        assert {row.rollout_id for row in store.rollouts(limit=None)} == set(wanted)


def end(proxy: ProxyProcess) -> None:
    """With SIGKILL; nothing that it started outlives it."""
    below = psutil.Process(proxy.pid).children(recursive=True)
    proxy.close()
    _, left = psutil.wait_procs(below, timeout=60)
    assert not left


def started_again(proxy: ProxyProcess) -> int:
    return proxy.log.read_text().count("it is started again")


def writers(proxy: ProxyProcess) -> list[int]:
    """The processes that write: of SQLite one, of PostgreSQL one for each event loop."""

    def found() -> list[int]:
        below = psutil.Process(proxy.pid).children(recursive=True)
        return [process.pid for process in below if process.name() == PROCESS_NAME]

    pids: list[int] = eventually(found, 60)
    return pids


def both(proxy: ProxyProcess) -> list[int]:
    """The workers, once there are two again."""

    def found() -> list[int] | None:
        try:
            pids: list[int] = httpx.get(f"{proxy.url}/healthz", timeout=20).json()["workers"]
        except httpx.TransportError:  # it was given to the one that was just killed
            return None
        return pids if len(pids) == 2 else None

    pids: list[int] = eventually(found, 60)
    return pids

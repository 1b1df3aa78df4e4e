"""Ranks that meet over a store in which earlier attempts left their keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from support.proxy.servers import eventually
from tracegrad_trainer.engine import rendezvous
from tracegrad_trainer.engine.rendezvous import meet, meet_ranks
from tracegrad_trainer.utils.network import find_free_port

LONG = timedelta(seconds=30)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(rendezvous, "_CALL_S", 0.2)
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


Met = Future[Store]


def start(
    threads: ThreadPoolExecutor,
    store: Store,
    rank: int,
    ranks: int,
    *,
    late_s: float = 0.0,
    timeout: timedelta = LONG,
) -> Met:
    def run() -> Store:
        time.sleep(late_s)
        return meet(store, rank, ranks, timeout)

    return threads.submit(run)


def together(*met: Met) -> Store:
    """The store of rank 0, which all of them share."""
    first, *others = [one.result(30) for one in met]
    first.set("shared", "1")
    assert all(other.check(["shared"]) for other in others)
    return first


def test_ranks_that_start_apart_meet_once_all_are_there(
    store: Store, threads: ThreadPoolExecutor
) -> None:
    begun = time.monotonic()
    lateness = [0.3, 0.0, 0.9]
    together(*(start(threads, store, r, 3, late_s=late) for r, late in enumerate(lateness)))
    assert time.monotonic() - begun > max(lateness)
    assert meet(store, 0, 1, LONG) is not store  # alone


def test_ranks_that_begin_again_read_nothing_of_the_attempt_before(
    store: Store, threads: ThreadPoolExecutor
) -> None:
    before = together(*(start(threads, store, rank, 2) for rank in range(2)))
    early = start(threads, store, 1, 2)
    assert not wait([early], 0.5).done  # rank 0 of the attempt before called, and is gone
    now = together(start(threads, store, 0, 2), early)
    before.set("address", "of a dead rank")
    assert not now.check(["address"])


def test_a_rank_that_answered_and_died_is_waited_for(
    store: Store, threads: ThreadPoolExecutor
) -> None:
    zero = start(threads, store, 0, 3)
    with pytest.raises(TimeoutError):  # it answers, and is gone
        meet(store, 1, 3, timedelta(seconds=0.1))
    two = start(threads, store, 2, 3, late_s=0.5)  # in a later call
    assert not wait([zero, two], 1.0).done
    together(zero, start(threads, store, 1, 3), two)


def test_of_two_processes_of_one_rank_one_is_let_go(
    store: Store, threads: ThreadPoolExecutor
) -> None:
    """A launcher was started anew, and the old one's rank is not dead yet."""
    short = timedelta(seconds=2)
    twice = [start(threads, store, 1, 2, timeout=short) for _ in range(2)]
    zero = start(threads, store, 0, 2, late_s=0.2)
    errors = [one.exception(10) for one in twice]
    [gone] = [error for error in errors if error is not None]
    assert isinstance(gone, TimeoutError)
    together(zero, *(one for one, error in zip(twice, errors, strict=True) if error is None))


def test_who_is_gone_is_named_by_those_that_waited(
    store: Store, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    short = timedelta(seconds=1)
    waited = start(threads, store, 1, 4, timeout=short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_REPORT_S", 0.3)
        with pytest.raises(TimeoutError, match=r"2 of 4 ranks are not there: 2, 3;"):
            meet(store, 0, 4, short)
    assert "2 of 4 ranks are not there: 2, 3; waiting for them" in caplog.text
    assert isinstance(waited.exception(5), TimeoutError)


def test_a_store_that_is_gone_while_ranks_wait_ends_them(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = find_free_port()
    servers = [
        dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False
        )
    ]
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    servers[0].set("tracegrad/call", "an old one")
    waiting = threads.submit(meet_ranks, LONG)
    eventually(lambda: servers[0].num_keys() >= 3)  # it has answered
    servers.clear()
    gone = rf"rank 0's host, 127\.0\.0\.1:{port}, answers no more"
    with pytest.raises(ConnectionError, match=gone):
        waiting.result(20)

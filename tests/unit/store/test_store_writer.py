"""Group commit, threads, processes, and a `kill -9` in the middle."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_facts import make_turn

from tracegrad.records import Fact, RewardGiven, Turn
from tracegrad.store import FactRefused, Store, StoreUnavailable, Writer

# Writes rollouts of chained turns; prints each turn's id once it is acknowledged.
_WRITE_FOR_EVER = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from store_facts import make_turn
from tracegrad.store import Store, Writer
name, most = sys.argv[3], int(sys.argv[4])
with Store.open(sys.argv[1]) as store, Writer(store) as writer:
    def agent(number):
        rollout, parent = f"{name}{number}", None
        for index in range(most):
            parent = make_turn(f"{rollout}.{index}", rollout, parent=parent, new=range(500))
            writer.submit([parent]).result()
            sys.stdout.write(parent.turn_id + "\\n")
            sys.stdout.flush()
    threads = [threading.Thread(target=agent, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
"""


@contextmanager
def _writing(url: str, name: str, most: int) -> Iterator[subprocess.Popen[str]]:
    """A process that writes; dead at the end, whatever the test found."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _WRITE_FOR_EVER, url, here, name, str(most)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_many_threads_share_transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = []
    append = store.append

    def counting(facts: Sequence[Fact]) -> None:
        commits.append(len(facts))
        append(facts)

    monkeypatch.setattr(store, "append", counting)

    def agent(name: str) -> list[Turn]:
        turns: list[Turn] = []
        for index in range(10):
            parent = turns[-1] if turns else None
            turns.append(make_turn(f"{name}.{index}", name, parent=parent))
            writer.submit([turns[-1]]).result(timeout=30)
        return turns

    with Writer(store) as writer, ThreadPoolExecutor(16) as pool:
        done = list(pool.map(agent, [f"r{n}" for n in range(16)]))
    for turns in done:
        assert store.rollout_turns(turns[0].rollout_id) == turns
    assert sum(commits) == 160
    assert len(commits) < 120, "waiting submissions go into one transaction"


def test_done_means_committed(store: Store, url: str) -> None:
    with Writer(store) as writer, Store.open(url) as other:
        for index in range(5):
            writer.submit([make_turn(f"t{index}")]).result(timeout=30)
            assert other.find_turn(f"t{index}") is not None


class _Held:
    """Holds the writer's thread inside a transaction until told."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.inside = threading.Event()
        append = store.append

        def held(facts: Sequence[Fact]) -> None:
            self.inside.set()
            assert self.go.wait(30)
            append(facts)

        monkeypatch.setattr(store, "append", held)


def test_a_bad_fact_fails_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(store, monkeypatch)
    with Writer(store) as writer:
        first = writer.submit([make_turn("first")])
        assert held.inside.wait(30)
        bad = writer.submit([make_turn("x"), RewardGiven(rollout_id="r", value=float("nan"))])
        good = [writer.submit([make_turn(f"g{n}")]) for n in range(3)]
        held.go.set()
        for future in (first, *good):
            future.result(timeout=30)
        with pytest.raises(FactRefused):
            bad.result(timeout=30)
    assert {turn.turn_id for turn in store.rollout_turns("r")} == {"first", "g0", "g1", "g2"}


def test_close_writes_what_was_submitted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(store, monkeypatch)
    writer = Writer(store)
    futures = [writer.submit([make_turn("t0")])]
    assert held.inside.wait(30)
    futures += [writer.submit([make_turn(f"t{n}")]) for n in range(1, 20)]
    held.go.set()
    writer.close()
    writer.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert len(store.rollout_turns("r")) == 20
    with pytest.raises(StoreUnavailable, match="closed"):
        writer.submit([make_turn("late")])


def test_a_caller_who_gives_up_takes_nothing_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _Held(store, monkeypatch)
    with Writer(store) as writer:
        writer.submit([make_turn("t0")])
        assert held.inside.wait(30)
        future: Future[None] = writer.submit([make_turn("t1")])
        assert not future.cancel()
        held.go.set()
    assert store.find_turn("t1") is not None


def test_kill_9_loses_no_acknowledged_turn(url: str) -> None:
    with _writing(url, "k", 100_000) as child:
        assert child.stdout is not None
        acknowledged = [child.stdout.readline().strip() for _ in range(40)]
        child.send_signal(signal.SIGKILL)
        acknowledged += [line.strip() for line in child.stdout if line.endswith("\n")]
        assert child.wait(timeout=30) == -signal.SIGKILL
    with Store.open(url) as store:
        kept = {t.turn_id for n in range(4) for t in store.rollout_turns(f"k{n}")}
        assert kept >= set(acknowledged)
        store.append([make_turn("afterwards")])

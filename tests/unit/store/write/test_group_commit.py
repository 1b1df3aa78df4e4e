"""Group commit, threads, processes, and a `kill -9` in the middle."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, text

from support.proxy.servers import eventually
from support.store.events import make_turn
from support.system.module_environment import environment
from tracegrad.events import Event, Reward, Turn
from tracegrad.store import EventRejected, GroupCommitWriter, Store, StoreBusy, StoreUnavailable
from tracegrad.store.errors import StoreLost

pytestmark = pytest.mark.databases("sqlite")  # of threads

# Writes rollouts of chained turns; prints each turn's id once it is acknowledged.
_WRITE_FOR_EVER = """
import sys, threading
from support.store.events import make_turn
from tracegrad.store import GroupCommitWriter, Store
name, most = sys.argv[2], int(sys.argv[3])
with Store.open(sys.argv[1]) as store, GroupCommitWriter(store) as writer:
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
    command = [sys.executable, "-c", _WRITE_FOR_EVER, url, name, str(most)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.databases("sqlite", "postgres")
def test_many_threads_share_transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = []
    append = store.append

    def counting(events: Sequence[Event], **more: Any) -> None:
        commits.append(len(events))
        append(events, **more)

    monkeypatch.setattr(store, "append", counting)

    def agent(name: str) -> list[Turn]:
        turns: list[Turn] = []
        for index in range(10):
            parent = turns[-1] if turns else None
            turns.append(make_turn(f"{name}.{index}", name, parent=parent))
            writer.submit([turns[-1]]).result(timeout=30)
        return turns

    with GroupCommitWriter(store) as writer, ThreadPoolExecutor(16) as pool:
        done = list(pool.map(agent, [f"r{n}" for n in range(16)]))
    for turns in done:
        assert store.rollout_turns(turns[0].rollout_id) == turns
    assert sum(commits) == 160
    assert len(commits) < 120, "waiting submissions go into one transaction"


@pytest.mark.databases("sqlite", "postgres")
def test_done_means_committed(writer: GroupCommitWriter, url: str) -> None:
    with Store.open(url) as other:
        for index in range(5):
            writer.submit([make_turn(f"t{index}")]).result(timeout=30)
            assert other.find_turn(f"t{index}") is not None


class Held:
    """Holds the writer's thread before its transaction until `go` is set."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.inside = threading.Event()
        append = store.append

        def held(events: Sequence[Event], **more: Any) -> None:
            self.inside.set()
            assert self.go.wait(30)
            append(events, **more)

        monkeypatch.setattr(store, "append", held)


@pytest.fixture
def held(store: Store, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(store, monkeypatch)


@pytest.fixture
def writer(store: Store) -> Iterator[GroupCommitWriter]:
    with GroupCommitWriter(store) as made:
        yield made


@pytest.mark.databases("sqlite", "postgres")
def test_a_bad_event_fails_alone(store: Store, held: Held, writer: GroupCommitWriter) -> None:
    first = writer.submit([make_turn("first")])
    assert held.inside.wait(30)
    bad = writer.submit([make_turn("x"), Reward(rollout_id="r", value=float("nan"))])
    good = [writer.submit([make_turn(f"g{n}")]) for n in range(3)]
    held.go.set()
    for future in (first, *good):
        future.result(timeout=30)
    with pytest.raises(EventRejected):
        bad.result(timeout=30)
    assert {turn.turn_id for turn in store.rollout_turns("r")} == {"first", "g0", "g1", "g2"}


def test_close_writes_what_was_submitted(
    store: Store, held: Held, writer: GroupCommitWriter
) -> None:
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


def test_cancelling_takes_nothing_back(store: Store, held: Held, writer: GroupCommitWriter) -> None:
    writer.submit([make_turn("t0")])
    assert held.inside.wait(30)
    submission = writer.submit([make_turn("t1")])
    assert not submission.cancel()
    held.go.set()
    writer.close()
    assert store.find_turn("t1") is not None


@pytest.mark.databases("sqlite", "postgres")
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


# Callers that give up


@contextmanager
def _locked(store: Store) -> Iterator[None]:
    """Another connection holds all that a writer needs, as a backup or a long repair does."""
    if store.database.describe().startswith("postgresql"):
        with store.appending() as connection:
            connection.execute(text("LOCK TABLE turns IN ACCESS EXCLUSIVE MODE"))
            yield
        return
    with sqlite3.connect(store.database.describe(), isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")
    other.close()


class Watched:
    """Says when the writer's thread begins a transaction and when it is about to commit it, and
    can hold it there."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.committing, self.go = (threading.Event() for _ in range(3))
        self.go.set()
        append = store.append

        def watched(events: Sequence[Event], *, before_commit: Any) -> None:
            def last(connection: Connection, new: Sequence[str]) -> None:
                before_commit(connection, new)
                self.committing.set()
                assert self.go.wait(30)

            self.began.set()
            append(events, before_commit=last)

        monkeypatch.setattr(store, "append", watched)


@pytest.fixture
def watched(store: Store, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(store, monkeypatch)


def _reasons(store: Store) -> dict[str, str | None]:
    return {turn.turn_id: turn.untrainable for turn in store.rollout_turns("r")}


def test_what_was_refused_while_it_waited_is_never_written(
    store: Store, held: Held, writer: GroupCommitWriter
) -> None:
    first = writer.submit([make_turn("first")])
    assert held.inside.wait(30)
    waiting = writer.submit([make_turn("waiting")])
    waiting.withdraw("too late")
    with pytest.raises(StoreUnavailable, match="too late"):
        waiting.result(timeout=0)
    assert writer.load().submissions == 1
    held.go.set()
    first.result(timeout=30)
    first.withdraw("it is stored")
    writer.close()
    assert _reasons(store) == {"first": None}
    assert writer.load() == (0, 0, 0, 0)


@pytest.mark.databases("sqlite", "postgres")
def test_what_was_refused_in_a_locked_store_is_not_trained_when_it_is_free(
    store: Store, watched: Watched, writer: GroupCommitWriter
) -> None:
    with _locked(store):
        refused = writer.submit([make_turn("refused"), make_turn("greedy", untrainable="greedy")])
        assert watched.began.wait(30)
        patient = writer.submit([make_turn("patient")])
        refused.withdraw("the store has not answered")
        with pytest.raises(StoreUnavailable, match="has not answered"):
            refused.result(timeout=0)
    patient.result(timeout=30)
    writer.submit([make_turn("retried")]).result(timeout=30)
    writer.close()
    marked = {"refused": "unacknowledged", "greedy": "greedy"}
    assert _reasons(store) == {**marked, "patient": None, "retried": None}
    assert writer.load().unacknowledged == 2


@pytest.mark.databases("sqlite", "postgres")
def test_the_mark_is_in_the_transaction_that_writes_the_turn(
    store: Store, url: str, watched: Watched, writer: GroupCommitWriter
) -> None:
    """A crash right after the commit leaves nothing to train."""
    watched.go.clear()
    with Store.open(url) as other:
        with _locked(store):
            refused = writer.submit([make_turn("refused")])
            assert watched.began.wait(30)
            refused.withdraw("too late")
        assert watched.committing.wait(30)
        assert other.find_turn("refused") is None, "not visible unmarked"
        watched.go.set()
    writer.close()
    assert _reasons(store) == {"refused": "unacknowledged"}


@pytest.mark.parametrize(("waits", "reason"), [(True, None), (False, "unacknowledged")])
def test_a_commit_on_its_way_is_waited_for_or_has_nothing_trained(
    store: Store, watched: Watched, writer: GroupCommitWriter, waits: bool, reason: str | None
) -> None:
    watched.go.clear()
    submission = writer.submit([make_turn("t")])
    assert watched.committing.wait(30)
    submission.withdraw("too late")
    assert not submission.done(), "nobody knows yet what becomes of it"
    assert waits or submission.abandon()
    watched.go.set()
    if waits:
        submission.result(timeout=30)
    writer.close()
    assert not submission.abandon(), "it is settled"
    assert _reasons(store) == {"t": reason}


def test_a_connection_that_breaks_in_the_commit_leaves_nothing_to_train(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit arrived, its answer did not: who asks is refused, and the turn is there."""
    append = store.append

    def broken(events: Sequence[Event], **more: Any) -> None:
        append(events, **more)
        raise StoreUnavailable("server closed the connection unexpectedly")

    monkeypatch.setattr(store, "append", broken)
    with (
        GroupCommitWriter(store) as writer,
        pytest.raises(StoreUnavailable, match="closed the connection"),
    ):
        writer.submit([make_turn("t")]).result(timeout=30)
    assert _reasons(store) == {"t": "unacknowledged"}
    assert writer.load().unacknowledged == 1


@pytest.mark.databases("sqlite", "postgres")
@pytest.mark.parametrize("down_meanwhile", [True, False])
def test_who_writes_a_refused_turn_again_and_gets_an_answer_has_it_trained(
    store: Store, monkeypatch: pytest.MonkeyPatch, down_meanwhile: bool
) -> None:
    """Whether the mark could be set before the turn came again (it is taken back) or not."""
    append, mark = store.append, store.mark_unacknowledged
    commits = iter([StoreUnavailable("server closed the connection unexpectedly")])

    def breaks_once(events: Sequence[Event], **more: Any) -> None:
        append(events, **more)
        for error in commits:
            raise error

    def unavailable(turn_ids: Sequence[str]) -> int:
        raise StoreUnavailable("the server is starting up")

    monkeypatch.setattr(store, "append", breaks_once)
    if down_meanwhile:
        monkeypatch.setattr(store, "mark_unacknowledged", unavailable)
    with GroupCommitWriter(store) as writer:
        with pytest.raises(StoreUnavailable, match="closed the connection"):
            writer.submit([make_turn("t")]).result(timeout=30)
        if not down_meanwhile:
            eventually(lambda: _reasons(store) == {"t": "unacknowledged"}, 30)
        writer.submit([make_turn("t")]).result(timeout=30)
        monkeypatch.setattr(store, "mark_unacknowledged", mark)
    assert _reasons(store) == {"t": None}


@pytest.mark.parametrize(("marked", "reason"), [(False, None), (True, "unacknowledged")])
def test_a_repeat_that_is_refused_leaves_a_turn_to_who_was_answered_before(
    store: Store, watched: Watched, writer: GroupCommitWriter, marked: bool, reason: str | None
) -> None:
    """Where nobody was, the mark that the repeat took back comes again."""
    writer.submit([make_turn("t")]).result(timeout=30)
    if marked:
        store.mark_unacknowledged(["t"])
    watched.committing.clear()
    watched.go.clear()
    repeat = writer.submit([make_turn("t")])
    assert watched.committing.wait(30)
    assert repeat.abandon()
    watched.go.set()
    writer.close()
    assert _reasons(store) == {"t": reason}


def test_a_repeat_that_is_withdrawn_takes_nothing_from_who_was_answered(
    store: Store, watched: Watched, writer: GroupCommitWriter
) -> None:
    writer.submit([make_turn("t")]).result(timeout=30)
    watched.began.clear()
    with _locked(store):
        repeat = writer.submit([make_turn("t")])
        assert watched.began.wait(30)
        repeat.withdraw("too late")
    writer.close()
    assert _reasons(store) == {"t": None}


def test_who_gives_up_before_a_transaction_is_repeated_has_nothing_trained(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, submitted = store.append, threading.Event()

    def repeated(events: Sequence[Event], *, before_commit: Any) -> None:
        assert submitted.wait(30)

        def last(connection: Connection, new: Sequence[str]) -> None:
            before_commit(connection, new)
            submission.withdraw("too late")
            before_commit(connection, new)

        append(events, before_commit=last)

    monkeypatch.setattr(store, "append", repeated)
    with GroupCommitWriter(store) as writer:
        submission = writer.submit([make_turn("t")])
        submitted.set()
        with pytest.raises(StoreUnavailable, match="given up"):
            submission.result(timeout=30)
    assert _reasons(store) == {"t": "unacknowledged"}


def test_who_gives_up_after_a_commit_that_the_server_cut_off_has_nothing_trained(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit arrived, its answer did not; what is written again changes nothing."""
    append, submitted, attempts = store.append, threading.Event(), []

    def lost_once(events: Sequence[Event], **more: Any) -> None:
        assert submitted.wait(30)
        attempts.append(events)
        if len(attempts) == 2:
            submission.withdraw("too late")
        append(events, **more)
        if len(attempts) == 1:
            raise StoreLost("the server is ended")

    monkeypatch.setattr(store, "append", lost_once)
    with GroupCommitWriter(store, reconnect_s=60) as writer:
        submission = writer.submit([make_turn("t")])
        submitted.set()
        with pytest.raises(StoreUnavailable, match="too late"):
            submission.result(timeout=30)
    assert len(attempts) == 2
    assert _reasons(store) == {"t": "unacknowledged"}


def test_what_is_withdrawn_from_a_batch_with_a_bad_event_is_not_written(
    store: Store, held: Held, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = threading.Event()
    writer.submit([make_turn("first")])
    assert held.inside.wait(30)
    earlier, refused = writer.submit([make_turn("earlier")]), writer.submit([make_turn("refused")])
    bad = writer.submit([Reward(rollout_id="r", value=float("nan"))])
    good = writer.submit([make_turn("good")])
    append = store.append

    def once_refused(events: Sequence[Event], **more: Any) -> None:
        if len(events) > 1 and not second.is_set():
            second.set()
            refused.withdraw("too late")
        append(events, **more)

    monkeypatch.setattr(store, "append", once_refused)
    held.go.set()
    for submission in (earlier, good):
        submission.result(timeout=30)
    for submission in (bad, refused):
        assert submission.exception(timeout=30) is not None
    writer.close()
    assert second.is_set()
    assert _reasons(store) == {"first": None, "earlier": None, "good": None}


def test_a_full_queue_refuses_at_once(store: Store, held: Held) -> None:
    with GroupCommitWriter(store, max_submissions=2) as writer:
        one = writer.submit([make_turn("one")])
        assert held.inside.wait(30)
        two = writer.submit([make_turn("two")])
        with pytest.raises(StoreBusy, match="2 submissions of 0 MiB wait to be written, and at"):
            writer.submit([make_turn("three")])
        assert (writer.load().submissions, writer.load().refused) == (2, 1)
        two.withdraw("too late")
        four = writer.submit([make_turn("four")])
        held.go.set()
        for submission in (one, four):
            submission.result(timeout=30)
        writer.submit([make_turn("five")]).result(timeout=30)
    assert _reasons(store).keys() == {"one", "four", "five"}


def test_bytes_are_bounded_too_and_one_may_be_of_any_size(store: Store, held: Held) -> None:
    large = {"messages": [{"role": "user", "content": "x" * 300_000}]}
    with GroupCommitWriter(store, max_bytes=100_000) as writer:
        first = writer.submit([make_turn("large", request=large)])
        assert writer.load().bytes > 300_000
        assert held.inside.wait(30)
        with pytest.raises(StoreBusy):
            writer.submit([make_turn("small")])
        held.go.set()
        first.result(timeout=30)
        writer.submit([make_turn("small")]).result(timeout=30)
        held.go.clear()
        last = writer.submit([make_turn("last")])
        with pytest.raises(StoreBusy):
            writer.submit([make_turn("large too", request=large)])
        held.go.set()
        last.result(timeout=30)
    assert writer.load().bytes == 0
    assert _reasons(store).keys() == {"large", "small", "last"}

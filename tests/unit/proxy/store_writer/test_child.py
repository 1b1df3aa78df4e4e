"""What the writing process says to several workers at a time."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from support.proxy.servers import eventually
from support.store.events import make_turn
from support.system.module_environment import environment
from tracegrad.events import UNACKNOWLEDGED, RolloutFinished
from tracegrad.proxy.store_writer.child import _Serving, _Unacknowledged
from tracegrad.proxy.store_writer.frames import Kind, encode, pickled, read_frame
from tracegrad.store import GroupCommitWriter, Store


class Worker:
    """One end of a connection that is served."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        self._connection = connection
        self._stream = connection.makefile("rb")

    def say(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        self._connection.sendall(encode(kind, number, payload))

    def heard(self) -> tuple[int, int] | None:
        frame = read_frame(self._stream)
        return None if frame is None else (frame.kind, frame.number)

    def hang_up(self, *, bye: bool = True) -> None:
        with suppress(OSError):  # a second time
            if bye:
                self._connection.sendall(encode(Kind.BYE))
            self._connection.shutdown(socket.SHUT_WR)


@contextmanager
def served(writer: GroupCommitWriter, workers: int) -> Iterator[list[Worker]]:
    unacknowledged = _Unacknowledged(writer)

    def serve(theirs: socket.socket) -> None:
        with theirs, theirs.makefile("rb") as stream:
            _Serving(theirs, writer, unacknowledged).run(stream)

    with ExitStack() as stack:
        found, threads = [], []
        for _ in range(workers):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            found.append(Worker(ours))
            threads.append(threading.Thread(target=serve, args=(theirs,)))
            threads[-1].start()
        yield found
        for worker, thread in zip(found, threads, strict=True):
            worker.hang_up()
            thread.join(30)
            assert not thread.is_alive()


def test_each_gets_its_own_answers(store: Store) -> None:
    with GroupCommitWriter(store) as writer, served(writer, 3) as workers:
        for number, worker in enumerate(workers):
            for turn in range(4):
                made = make_turn(f"{number}.{turn}", f"r{number}")
                worker.say(Kind.SUBMIT, turn, pickled((made,)))
        for worker in workers:
            assert sorted(filter(None, (worker.heard() for _ in range(4)))) == [
                (Kind.DONE, turn) for turn in range(4)
            ]
    assert [len(store.rollout_turns(f"r{number}")) for number in range(3)] == [4, 4, 4]


def test_who_hangs_up_is_answered_first(store: Store) -> None:
    with GroupCommitWriter(store) as writer, served(writer, 1) as [worker]:
        worker.say(Kind.SUBMIT, 1, pickled((make_turn("t", "r"),)))
        worker.say(Kind.DOUBT, 2, pickled(frozenset({"nobody has it"})))
        worker.hang_up()
        assert {worker.heard(), worker.heard()} == {(Kind.DONE, 1), (Kind.DONE, 2)}
        assert worker.heard() is None


def test_who_does_not_read_holds_up_nobody(store: Store) -> None:
    """Its answers are more than the system holds for it."""
    with GroupCommitWriter(store) as writer, served(writer, 2) as [stopped, other]:
        for number in range(400):
            ended = RolloutFinished(rollout_id=f"r{number}")
            stopped.say(Kind.SUBMIT, number, pickled((ended,)))
        other.say(Kind.SUBMIT, 1, pickled((make_turn("t", "s"),)))
        assert other.heard() == (Kind.DONE, 1)
        found = {stopped.heard() for _ in range(400)}
        assert found == {(Kind.DONE, number) for number in range(400)}


def test_what_a_worker_that_ended_waited_for_is_never_trained(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn is being written by then, one waits."""
    began, go = threading.Event(), threading.Event()
    append = store.append

    def held(*args: Any, **more: Any) -> None:
        began.set()
        assert go.wait(30)
        append(*args, **more)

    monkeypatch.setattr(store, "append", held)
    with GroupCommitWriter(store) as writer, served(writer, 2) as [ended, other]:
        ended.say(Kind.SUBMIT, 1, pickled((make_turn("t", "r"),)))
        assert began.wait(30)
        ended.say(Kind.SUBMIT, 2, pickled((make_turn("u", "r"),)))
        ended.hang_up(bye=False)
        eventually(lambda: writer.load().submissions == 1, 30)
        other.say(Kind.SUBMIT, 1, pickled((make_turn("v", "s"),)))
        go.set()
        assert other.heard() == (Kind.UNACKNOWLEDGED, 1)
        assert other.heard() == (Kind.DONE, 1)
        assert ended.heard() is None
    assert {t.turn_id: t.untrainable for t in store.rollout_turns("r")} == {"t": UNACKNOWLEDGED}


def test_what_cannot_be_served_ends_the_process() -> None:
    """Before its worker sees that the connection is closed."""
    script = """
import socket
from types import SimpleNamespace
from tracegrad.proxy.store_writer.child import _serve_worker
def fail(stream):
    raise RuntimeError("a fault")
ours, theirs = socket.socketpair()
_serve_worker(theirs, SimpleNamespace(run=fail))
print("goes on")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "a fault" in ended.stderr


def test_turns_without_acknowledgement_are_counted_once(store: Store) -> None:
    store.append([make_turn("t", "r"), make_turn("u", "s")])
    with GroupCommitWriter(store) as writer, served(writer, 2) as [one, other]:
        one.say(Kind.DOUBT, 1, pickled(frozenset({"t", "u"})))
        assert (one.heard(), one.heard()) == ((Kind.UNACKNOWLEDGED, 2), (Kind.DONE, 1))
        for worker in (other, one):
            worker.say(Kind.PING, 5)
            assert worker.heard() == (Kind.PONG, 5)

"""What the writing process says to several workers at a time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from support.store.events import make_turn
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

    def hang_up(self) -> None:
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


def test_turns_without_acknowledgement_are_counted_once(store: Store) -> None:
    store.append([make_turn("t", "r"), make_turn("u", "s")])
    with GroupCommitWriter(store) as writer, served(writer, 2) as [one, other]:
        one.say(Kind.DOUBT, 1, pickled(frozenset({"t", "u"})))
        assert (one.heard(), one.heard()) == ((Kind.UNACKNOWLEDGED, 2), (Kind.DONE, 1))
        for worker in (other, one):
            worker.say(Kind.PING, 5)
            assert worker.heard() == (Kind.PONG, 5)

"""The store's writer in a process of its own: what a proxy submits is written whatever ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop

from support.proxy.servers import eventually
from support.store.events import make_turn
from support.system.module_environment import environment
from tracegrad.events import Turn
from tracegrad.proxy.store_async import wait_committed
from tracegrad.proxy.store_writer import client, own_process
from tracegrad.proxy.store_writer.client import StoreWriter
from tracegrad.proxy.store_writer.frames import FrameReader, Kind, Opening, encode
from tracegrad.proxy.store_writer.own_process import OwnProcess
from tracegrad.proxy.store_writer.process import WriterProcess
from tracegrad.store import EventRejected, Store, StoreBusy, StoreUnavailable, Submission
from tracegrad.store.errors import ParentMissing

# A caller's patience in tests that hold the store back.
PATIENCE_S = 1.0

Work = Callable[[StoreWriter], Awaitable[None]]
Runner = Callable[[Any], Any]


both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture
def run() -> Runner:
    """As proxies run."""
    return uvloop.run


def opened(
    store: Store, start: Callable[[], WriterProcess] = WriterProcess.start, **more: Any
) -> StoreWriter:
    """As restarts are made: another interpreter, since tests have threads."""
    url = f"sqlite:///{store.database.describe()}"
    opening = Opening(url, log_format="text", remembered=64, reconnect_s=15.0)
    return StoreWriter(OwnProcess(WriterProcess.start(), start), opening, **more)


def process_of(writer: StoreWriter) -> WriterProcess:
    assert isinstance(writer._link, OwnProcess)
    return writer._link.process


@contextmanager
def locked(store: Store) -> Iterator[Callable[[], None]]:
    """By another process, as it seems, until it is called: readers read, nobody writes."""
    other = sqlite3.connect(
        store.database.describe(), isolation_level=None, check_same_thread=False
    )
    other.execute("BEGIN EXCLUSIVE")
    release = threading.Lock()

    def unlock() -> None:
        if release.acquire(blocking=False):
            other.execute("ROLLBACK")
            other.close()

    try:
        yield unlock
    finally:
        unlock()


async def stored(submission: Submission) -> None:
    """However long another interpreter takes to start on a busy machine."""
    await wait_committed(submission, patience_s=240)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def chain(rollout: str, turns: int) -> list[Turn]:
    made: list[Turn] = []
    for index in range(turns):
        parent = made[-1] if made else None
        made.append(make_turn(f"{rollout}.{index}", rollout, parent=parent))
    return made


@both_loops
def test_turns_are_stored_as_they_were_when_their_submission_resolves(
    store: Store, run: Runner
) -> None:
    chains = [chain(f"r{number}", 5) for number in range(8)]

    async def agent(writer: StoreWriter, turns: list[Turn]) -> None:
        for turn in turns:
            await stored(writer.submit([turn]))
            assert store.find_turn(turn.turn_id) == turn

    async def agents() -> None:
        await asyncio.gather(*(agent(writer, turns) for turns in chains))
        assert writer.load() == (0, 0, 0, 0)

    with opened(store) as writer:
        run(agents())
    for turns in chains:
        assert store.rollout_turns(turns[0].rollout_id) == turns


@both_loops
def test_what_nobody_waited_for_is_written_before_the_end(store: Store, run: Runner) -> None:
    turns = chain("r", 60)

    async def submitted() -> None:
        for turn in turns[:30]:
            writer.submit([turn])
        await asyncio.sleep(0)  # not long enough to be sent, let alone answered
        for turn in turns[30:]:
            writer.submit([turn])

    with opened(store) as writer:
        run(submitted())
    assert store.rollout_turns("r") == turns
    assert writer.load() == (0, 0, 0, 0)
    with pytest.raises(StoreUnavailable, match="closed"):
        writer.submit([turns[0]])


def test_a_writer_that_was_never_used_ends(store: Store) -> None:
    with opened(store) as writer:
        process = process_of(writer)
    assert process.wait(0) == 0


@both_loops
def test_a_killed_process_costs_no_turn(
    store: Store, run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    kills = 3
    chains = [chain(f"r{number}", 40) for number in range(4)]
    written = 0

    async def agent(writer: StoreWriter, turns: list[Turn]) -> None:
        nonlocal written
        for turn in turns:
            await stored(writer.submit([turn]))
            written += 1

    async def killer(writer: StoreWriter) -> None:
        for number in range(kills):
            await until(lambda: written >= (number + 1) * 160 // (kills + 1))  # noqa: B023
            process = process_of(writer)
            process.kill()
            await until(lambda: process_of(writer) is not process)  # noqa: B023

    async def all_of_them() -> None:
        await asyncio.gather(killer(writer), *(agent(writer, turns) for turns in chains))

    with opened(store) as writer:
        run(all_of_them())
    for turns in chains:
        assert store.rollout_turns(turns[0].rollout_id) == turns, "all of them, trainable"
    said = [r.getMessage() for r in caplog.records if "started again" in r.getMessage()]
    assert len(said) == kills
    assert "was ended by SIGKILL" in said[0]


def test_errors_come_back_as_they_are(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"deeper": nested}
    orphan = make_turn("b", "r", parent=make_turn("a", "r"))
    unknown = make_turn("c", "r", request={"value": threading.Lock()})
    odd = make_turn("d", "r", model=object())
    only_here = type("OnlyHere", (), {"__module__": "only_here"})
    here = SimpleNamespace(OnlyHere=only_here)
    monkeypatch.setitem(sys.modules, "only_here", here)  # type: ignore[arg-type]
    elsewhere = make_turn("g", "r", request={"value": only_here()})

    async def refused() -> None:
        for turn, error, words in (
            (orphan, ParentMissing, "turn a, parent of b, is not stored"),
            (make_turn("", "r" * 600), EventRejected, "rollout_id: 600 bytes"),
        ):
            with pytest.raises(error, match=words):
                await stored(writer.submit([turn]))
        with pytest.raises(EventRejected, match="nested too deeply"):
            writer.submit([make_turn("e", "r", request=nested)])
        with pytest.raises(EventRejected, match="cannot be stored"):
            writer.submit([unknown])
        with pytest.raises(RuntimeError, match="Error: "):
            await stored(writer.submit([odd]))
        with pytest.raises(RuntimeError, match="Error: "):
            await stored(writer.submit([elsewhere]))
        await stored(writer.submit([make_turn("f", "r")]))

    with opened(store) as writer:
        run(refused())
    assert [turn.turn_id for turn in store.rollout_turns("r")] == ["f"]


def test_more_than_may_wait_is_refused_at_once(store: Store, run: Runner) -> None:
    turns = chain("r", 3)

    async def submitted() -> None:
        with locked(store):
            writer.submit([turns[0]])
            writer.submit([turns[1]])
            with pytest.raises(StoreBusy, match="2 submissions of 0 MiB wait"):
                writer.submit([turns[2]])
            assert writer.load().submissions == 2
            assert writer.load().refused == 1

    with opened(store, max_submissions=2) as writer:
        run(submitted())
    assert store.rollout_turns("r") == turns[:2]


def test_bytes_are_bounded_and_one_submission_may_be_larger(store: Store, run: Runner) -> None:
    turns = chain("r", 2)

    async def submitted() -> None:
        first = writer.submit([turns[0]])
        with pytest.raises(StoreBusy):
            writer.submit([turns[1]])
        await stored(first)
        await stored(writer.submit([turns[1]]))

    with opened(store, max_bytes=10) as writer:
        run(submitted())
    assert store.rollout_turns("r") == turns


def test_what_was_refused_is_marked(store: Store, run: Runner) -> None:
    """The first is being written when it is given up, the second waits behind it."""
    turns = [make_turn(f"t{number}", f"r{number}") for number in range(3)]

    async def refused() -> None:
        with locked(store) as unlock:
            given_up = [writer.submit([turns[0]])]
            await asyncio.sleep(0.5)  # until it is being written, or not: both must hold
            given_up.append(writer.submit([turns[1]]))
            answers = await asyncio.gather(
                *(wait_committed(each, patience_s=PATIENCE_S) for each in given_up),
                return_exceptions=True,
            )
            assert [type(answer) for answer in answers] == [StoreUnavailable] * 2
            unlock()
        await stored(writer.submit([turns[2]]))

    with opened(store) as writer:
        run(refused())
    trainable = [
        turn.turn_id
        for number in range(3)
        for turn in store.rollout_turns(f"r{number}")
        if turn.untrainable is None
    ]
    assert trainable == ["t2"]


@pytest.mark.parametrize("known", [True, False])
def test_a_turn_that_was_given_up_when_its_process_was_killed_is_never_trained(
    store: Store, run: Runner, known: bool
) -> None:
    turn, later = make_turn("t", "r"), make_turn("u", "s")

    async def given_up() -> None:
        process = process_of(writer)
        first = writer.submit([turn])
        if known:  # and nobody was told
            os.kill(process.pid, signal.SIGSTOP)
            with Store.attach(writer._opening.url) as other:
                other.append([turn])
        else:
            os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="has not answered"):
            await wait_committed(first, patience_s=0.1)
        process.kill()
        await stored(writer.submit([later]))
        await until(lambda: not writer._doubtful)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracegrad.proxy.store_async.COMMIT_TIMEOUT_S", 0.1)
        with opened(store) as writer:
            run(given_up())
    kept = store.rollout_turns("r")
    assert [each.untrainable for each in kept] == (["unacknowledged"] if known else [])
    assert writer.load().unacknowledged == len(kept)


def test_a_turn_that_the_process_before_had_stored_is_marked_when_it_is_given_up(
    store: Store, run: Runner
) -> None:
    """The next process never wrote it: what is in the store is the first one's doing."""
    first, turn = make_turn("s", "q"), make_turn("t", "r")

    async def given_up() -> None:
        await stored(writer.submit([first]))
        process = process_of(writer)
        os.kill(process.pid, signal.SIGSTOP)
        submission = writer.submit([turn])
        with Store.attach(writer._opening.url) as other:
            other.append([turn])  # and nobody was told
        with locked(store) as unlock:
            process.kill()
            await until(lambda: process_of(writer) is not process and writer._heard)
            with pytest.raises(StoreUnavailable, match="has not answered"):
                await wait_committed(submission, patience_s=0.1)
            unlock()
        await until(lambda: not writer._doubtful)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "LOOK_EVERY_S", 0.1)
        patch.setattr(client, "MISSED_LOOKS", 10_000)
        patch.setattr(OwnProcess, "missed_at_start", 10_000)
        with opened(store) as writer:
            run(given_up())
    assert [each.untrainable for each in store.rollout_turns("r")] == ["unacknowledged"]


def test_an_answer_that_was_on_its_way_when_its_caller_left_marks_the_turn(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[Any, bytes]] = []
    data_received = client._Connection.data_received
    monkeypatch.setattr(
        client._Connection, "data_received", lambda one, data: held.append((one, data))
    )
    monkeypatch.setattr("tracegrad.proxy.store_async.COMMIT_TIMEOUT_S", 0.1)
    [turn] = chain("r", 1)

    async def refused() -> None:
        submission = writer.submit([turn])
        await until(lambda: held)
        with pytest.raises(StoreUnavailable, match="has not answered"):
            await wait_committed(submission, patience_s=0.1)
        monkeypatch.setattr(client._Connection, "data_received", data_received)
        for connection, data in held:
            data_received(connection, data)
        await until(lambda: not writer._doubtful)
        assert writer.load().submissions == 0

    with opened(store) as writer:
        run(refused())
    assert [each.untrainable for each in store.rollout_turns("r")] == ["unacknowledged"]


def test_what_a_process_that_hangs_had_is_written_at_the_end(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_END_S", 0.2)
    monkeypatch.setattr("tracegrad.proxy.store_async.COMMIT_TIMEOUT_S", 0.1)
    refused, turns = make_turn("t", "q"), chain("r", 20)

    async def hung() -> None:
        await stored(writer.submit([turns[0]]))
        os.kill(process_of(writer).pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await wait_committed(writer.submit([refused]), patience_s=0.1)
        with Store.attach(writer._opening.url) as other:
            other.append([refused])
        for turn in turns[1:]:
            writer.submit([turn])

    with opened(store, max_submissions=20) as writer:
        run(hung())
    assert store.rollout_turns("r") == turns
    assert [each.untrainable for each in store.rollout_turns("q")] == ["unacknowledged"]
    assert writer.load().submissions == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 6])
def test_it_is_started_again_whatever_ended_it(
    store: Store, run: Runner, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    turns = chain("r", 2)

    async def ended() -> None:
        await stored(writer.submit([turns[0]]))
        os.kill(process_of(writer).pid, number)
        await stored(writer.submit([turns[1]]))

    with opened(store) as writer:
        run(ended())
    assert store.rollout_turns("r") == turns
    assert "was ended by " in caplog.text


def test_a_submission_that_ends_each_process_is_refused_at_last(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_process, "_FIRST_PAUSE_S", 0.01)
    turns = [make_turn(f"t{number}", f"r{number}") for number in range(2)]
    starts = 0

    def start() -> WriterProcess:
        nonlocal starts
        starts += 1
        process = WriterProcess.start()
        if starts < client._MOST_TRIES:
            process.kill()
        return process

    async def ended() -> None:
        process_of(writer).kill()
        poison, other = writer.submit([turns[0]]), writer.submit([turns[1]])
        with pytest.raises(StoreUnavailable, match="processes ended by writing it"):
            await stored(poison)
        await stored(other)

    with opened(store, start) as writer:
        run(ended())
    assert store.rollout_turns("r1") == [turns[1]]


def test_a_turn_that_is_written_again_after_it_was_doubted_is_trained(
    store: Store, run: Runner
) -> None:
    turn, later = make_turn("t", "r"), make_turn("u", "s")

    async def written_again() -> None:
        process = process_of(writer)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await wait_committed(writer.submit([turn]), patience_s=0.1)
        with Store.attach(writer._opening.url) as other:
            other.append([turn])
        process.kill()
        await stored(writer.submit([turn]))
        await until(lambda: not writer._doubted)
        assert not writer._doubtful
        process = process_of(writer)
        process.kill()
        await stored(writer.submit([later]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracegrad.proxy.store_async.COMMIT_TIMEOUT_S", 0.1)
        with opened(store) as writer:
            run(written_again())
    assert [each.untrainable for each in store.rollout_turns("r")] == [None]


def test_it_is_reached_later_where_no_file_is_left(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_process, "_FIRST_PAUSE_S", 0.01)
    [turn] = chain("r", 1)

    class Full:
        """The process' socket, of which the system makes no other for a while."""

        def __init__(self, connection: Any) -> None:
            self.connection, self.refused = connection, 0

        def dup(self) -> Any:
            self.refused += 1
            if self.refused < 3:
                raise OSError(24, "Too many open files")
            return self.connection.dup()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

    async def reached() -> None:
        await stored(writer.submit([turn]))

    with opened(store) as writer:
        process = process_of(writer)
        process.connection = Full(process.connection)  # type: ignore[assignment]
        run(reached())
    assert store.rollout_turns("r") == [turn]
    assert caplog.text.count("cannot be reached") == 2


def test_a_restart_takes_no_module_of_the_folder(
    store: Store, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('somebody else wrote this')\n")
    monkeypatch.chdir(tmp_path)

    [turn] = chain("r", 1)

    async def written() -> None:
        process_of(writer).kill()
        await stored(writer.submit([turn]))

    with opened(store) as writer:
        run(written())
    assert store.rollout_turns("r") == [turn]


def test_it_ends_with_its_proxy_even_where_it_is_stopped(tmp_path: Path, empty_store: Path) -> None:
    """Other workers would wait for its turn for ever."""
    script = f"""
import asyncio, os, shutil, signal
from support.store.events import make_turn
from tracegrad.proxy.store_async import wait_committed
from tracegrad.proxy.store_writer.client import StoreWriter
from tracegrad.proxy.store_writer.frames import Opening
from tracegrad.proxy.store_writer.own_process import OwnProcess
from tracegrad.proxy.store_writer.process import WriterProcess
shutil.copy({str(empty_store)!r}, "store.db")
process = WriterProcess.{{how}}()
writer = StoreWriter(OwnProcess(process), Opening("sqlite:///store.db", "text", 64, 1.0))
async def main():
    await wait_committed(writer.submit([make_turn("t", "r")]))
    os.kill(process.pid, signal.SIGSTOP)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    for how in ("fork", "start"):
        ended = subprocess.run(
            [sys.executable, "-c", script.replace("{how}", how)],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        [pid] = map(int, ended.stdout.split())
        eventually(lambda pid=pid: not psutil.pid_exists(pid) or _is_dead(pid))  # type: ignore[misc]


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_process_that_hangs_is_killed_and_replaced(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(OwnProcess, "missed_at_start", 10_000)
    turns = chain("r", 2)

    async def hung() -> None:
        await stored(writer.submit([turns[0]]))
        os.kill(process_of(writer).pid, signal.SIGSTOP)
        await stored(writer.submit([turns[1]]))

    with caplog.at_level(logging.ERROR), opened(store) as writer:
        run(hung())
    assert store.rollout_turns("r") == turns
    assert "does nothing" in caplog.text


def test_a_store_that_hangs_is_no_reason_to_kill(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(client, "MISSED_LOOKS", 60)
    monkeypatch.setattr(OwnProcess, "missed_at_start", 10_000)
    [turn] = chain("r", 1)

    async def waited() -> None:
        process = process_of(writer)
        with locked(store):
            submission = writer.submit([turn])
            await until(lambda: writer._heard)
            await asyncio.sleep(0.05 * 60 * 1.5)
            assert not submission.done()
        await stored(submission)
        assert process_of(writer) is process

    with opened(store) as writer:
        run(waited())


def test_it_is_tried_again_where_no_process_can_be_started(
    store: Store, run: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_process, "_FIRST_PAUSE_S", 0.01)
    failures = 0
    [turn] = chain("r", 1)

    def start() -> WriterProcess:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise OSError("no more processes")
        return WriterProcess.start()

    async def killed() -> None:
        process_of(writer).kill()
        await stored(writer.submit([turn]))

    with opened(store, start) as writer:
        run(killed())
    assert store.rollout_turns("r") == [turn]
    assert failures == 3
    assert caplog.text.count("cannot be started: no more processes") == 2


def test_a_fork_writes_as_a_program_of_its_own_does(tmp_path: Path, empty_store: Path) -> None:
    """In a process without threads, as `tracegrad proxy` is at its start."""
    script = f"""
import asyncio, os, shutil, socket
from support.store.events import make_turn
from tracegrad.proxy.store_async import wait_committed
from tracegrad.proxy.store_writer.client import StoreWriter
from tracegrad.proxy.store_writer.frames import Opening
from tracegrad.proxy.store_writer.own_process import OwnProcess
from tracegrad.proxy.store_writer.process import WriterProcess
from tracegrad.store import Store
shutil.copy({str(empty_store)!r}, "store.db")
held = socket.create_server(("127.0.0.1", 0))
process = WriterProcess.fork()
opening = Opening("sqlite:///store.db", "text", remembered=64, reconnect_s=1.0)
with StoreWriter(OwnProcess(process), opening) as writer:
    async def main():
        await wait_committed(writer.submit([make_turn("t", "r")]))
        files = os.listdir(f"/proc/{{process.pid}}/fd")
        targets = [os.readlink(f"/proc/{{process.pid}}/fd/{{each}}") for each in files]
        own = os.readlink(f"/proc/self/fd/{{held.fileno()}}")
        assert own not in targets, "the port is the proxy's alone"
    asyncio.run(main())
with Store.open("sqlite:///store.db") as store:
    assert [turn.turn_id for turn in store.rollout_turns("r")] == ["t"]
assert process.wait(0) == 0
print("done")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "done\n", ended.stderr


def test_frames_survive_any_cut() -> None:
    frames = [(Kind.SUBMIT, 1, b"x" * 300), (Kind.PING, 2**40, b""), (Kind.FAILED, 3, b"ab")]
    wire = b"".join(encode(*frame) for frame in frames)
    for step in (1, 2, 7, 13, 300, len(wire)):
        reader = FrameReader()
        pieces = [wire[at : at + step] for at in range(0, len(wire), step)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == frames

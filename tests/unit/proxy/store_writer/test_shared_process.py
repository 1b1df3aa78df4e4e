"""A worker's way to the process that writes for all: what it is given, and what it does without."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tracegrad.proxy.store_writer import shared_process
from tracegrad.proxy.store_writer.shared_process import ASK, SharedProcess

Line = tuple[SharedProcess, socket.socket]


@pytest.fixture
def line() -> Iterator[Line]:
    """A worker's process, and the supervisor's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs:
        yield SharedProcess(theirs), ours


def give(end: socket.socket, pid: int) -> socket.socket:
    """A connection to process `pid`; the other end of it."""
    mine, given = socket.socketpair()
    with given:
        socket.send_fds(end, [str(pid).encode()], [given.fileno()])
    return mine


def is_connected(process: SharedProcess, other: socket.socket) -> bool:
    assert process.connection is not None
    other.send(b"x")
    return process.connection.recv(1) == b"x"


async def asked(supervisor: socket.socket) -> bool:
    return await asyncio.to_thread(supervisor.recv, 64) == ASK


async def test_it_asks_for_a_process_and_waits_for_it(line: Line) -> None:
    process, supervisor = line
    for pid in (7, 8):
        renewed = asyncio.ensure_future(process.renew(answered=True))
        assert await asked(supervisor)
        await asyncio.sleep(0.05)
        assert not renewed.done()
        with give(supervisor, pid) as other:
            await asyncio.wait_for(renewed, 30)
            assert process.pid == pid
            assert is_connected(process, other)
        await asyncio.wait_for(process.gone(), 30)
        assert process.connection is None


async def test_it_asks_again_where_it_had_no_file_left(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_process, "_ASK_AGAIN_S", 0.01)
    process, supervisor = line
    with caplog.at_level(logging.ERROR):
        renewed = asyncio.ensure_future(process.renew(answered=False))
        assert await asked(supervisor)
        supervisor.send(b"7")  # as the system delivers a message whose file it could not
        assert await asked(supervisor)
    with give(supervisor, 7) as other:
        await asyncio.wait_for(renewed, 30)
        assert is_connected(process, other)
    assert "no file left" in caplog.text


async def test_without_a_supervisor_it_waits_until_its_loop_ends(line: Line) -> None:
    process, supervisor = line
    supervisor.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.renew(answered=True), 0.2)


@pytest.mark.parametrize("end", ["finish", "gone"])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_process_that_does_not_hang_up_is_killed(
    line: Line, hangs: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_process, "_LAST_WORDS_S", 0.2 if hangs else 60)
    process, supervisor = line
    mine, given = socket.socketpair()
    reads = "import socket, sys; end = socket.socket(fileno=int(sys.argv[1])); end.recv(1)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{reads}; {'input()' if hangs else ''}", str(given.fileno())],
        pass_fds=[given.fileno()],
        stdin=subprocess.PIPE,
    ) as program:
        given.close()
        socket.send_fds(supervisor, [str(program.pid).encode()], [mine.fileno()])
        mine.close()
        asyncio.run(process.renew(answered=True))
        assert process.connection is not None
        if end == "finish":
            process.finish(0.2 if hangs else 60)
        else:
            asyncio.run(process.gone())
        assert program.wait(30) == (-signal.SIGKILL if hangs else 0)


async def test_without_a_process_there_is_nothing_to_finish(line: Line) -> None:
    process, supervisor = line
    process.finish(0)
    assert supervisor.recv(64) == b""

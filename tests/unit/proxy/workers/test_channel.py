"""What goes between the supervisor and a worker."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress

import pytest

from tracegrad.proxy.workers.channel import Channel, ChannelClosed, Received


def test_messages_and_connections_come_in_order_until_the_other_side_ends() -> None:
    ours, theirs = Channel.pair()
    client, connection = socket.socketpair()
    ours.send({"held": True})
    assert ours.send_connection(connection)
    connection.close()
    ours.send({"held": False})
    assert theirs.receive() == ({"held": True}, None, False)
    found = theirs.receive()
    assert found is not None
    assert found.connection is not None
    found.connection.sendall(b"hello")
    assert client.recv(5) == b"hello"
    assert theirs.receive() == ({"held": False}, None, False)
    assert theirs.receive() is None
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.receive()


def test_no_connection_overtakes_what_waits_for_a_worker_that_does_not_read() -> None:
    """One that was accepted behind a closed gate must not meet an open one."""
    ours, theirs = Channel.pair()
    client, connection = socket.socketpair()
    with client, connection:
        sent = 0
        while not ours.is_blocked:
            ours.send({"number": sent, "text": "x" * 10_000})
            sent += 1
        assert theirs.receive() is not None  # which makes room
        assert not ours.send_connection(connection)
        numbers = [0]
        while ours.is_blocked or len(numbers) < sent:
            ours.flush()
            while (found := theirs.receive()) is not None:
                assert found.message is not None
                numbers.append(found.message["number"])
        assert numbers == list(range(sent))
        assert ours.send_connection(connection)


def test_a_connection_for_which_there_is_no_file_is_lost_and_nothing_else() -> None:
    ours, theirs = Channel.pair()
    client, connection = socket.socketpair()
    wanted = [(None, None, True), ({"next": 1}, None, False)]
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if _received_without_files(theirs) == wanted else 1)
        finally:
            os._exit(2)
    assert ours.send_connection(connection)
    connection.close()
    ours.send({"next": 1})
    assert os.waitpid(pid, 0)[1] == 0
    client.settimeout(5)
    assert client.recv(1) == b"", "its client is told"


def _received_without_files(channel: Channel) -> list[Received]:
    """Two words of the channel's, in a process that can open nothing more."""
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError):
        while True:
            os.dup(0)
    got: list[Received] = []
    while len(got) < 2:
        if (found := channel.receive()) is not None:
            got.append(found)
    return got

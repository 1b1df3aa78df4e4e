"""The socket that outlives the proxy that serves it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tracegrad.proxy.http.listener import (
    ListenError,
    activated_listener,
    inherited_listener,
    listen,
)


def test_a_taken_port_is_one_line_with_what_to_do() -> None:
    with listen("127.0.0.1", 0, if_taken="take another") as first:
        port = first.getsockname()[1]
        with pytest.raises(ListenError) as refused:
            listen("127.0.0.1", port, field="proxy.port", if_taken="take another")
    assert str(refused.value) == (f"proxy.port: port {port} of 127.0.0.1 is in use; take another")


@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_every_address_is_of_both_families(client: str) -> None:
    with listen("::", 0, if_taken="") as ours:
        socket.create_connection((client, ours.getsockname()[1]), timeout=5).close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ListenError, match=r"^cannot listen on 203\.0\.113\.1:0: \S+"):
        listen("203.0.113.1", 0, if_taken="")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_a_supervisor_opened_is_served(host: str) -> None:
    with listen(host, 0, if_taken="") as ours:
        with inherited_listener(os.dup(ours.fileno())) as theirs:
            address = theirs.getsockname()
            with socket.create_connection(address[:2]) as client:
                theirs.accept()[0].close()
                assert client.recv(1) == b""
        # Whoever served it has ended: connections wait for the next.
        with socket.create_connection(address[:2]):
            ours.accept()[0].close()


def test_what_is_no_listener_is_refused_and_stays_open() -> None:
    with socket.socket() as idle, pytest.raises(ListenError, match="no TCP socket that listens"):
        inherited_listener(idle.fileno())
    with socket.socket() as idle:
        with pytest.raises(ListenError):
            inherited_listener(idle.fileno())
        assert idle.getsockname() is not None
    read, write = os.pipe()
    try:
        with pytest.raises(ListenError, match=f"fd: {read} is no socket"):
            inherited_listener(read)
    finally:
        os.close(read)
        os.close(write)


PASSED = """
import os, sys
fd, count, pid = map(int, sys.argv[1:])
os.dup2(fd, 3)
os.environ |= {"LISTEN_FDS": str(count), "LISTEN_PID": str(pid or os.getpid())}
os.execv(sys.executable, [sys.executable, "-c", '''
from tracegrad.proxy.http.listener import ListenError, activated_listener
try:
    found = activated_listener()
    print(found and found.getsockname()[1])
except ListenError as error:
    print(error)
'''])
"""


@pytest.mark.parametrize(
    ("count", "pid", "said"),
    [
        (1, 0, None),
        (1, 1, "None"),  # for another process
        (2, 0, "LISTEN_FDS: 2 sockets were passed, and one is served: name one"),
    ],
)
def test_what_an_init_system_passes_is_served(count: int, pid: int, said: str | None) -> None:
    with listen("127.0.0.1", 0, if_taken="") as ours:
        command = [sys.executable, "-c", PASSED, str(ours.fileno()), str(count), str(pid)]
        done = subprocess.run(
            command, pass_fds=[ours.fileno()], stdout=subprocess.PIPE, text=True, check=True
        )
        assert done.stdout.strip() == (said or str(ours.getsockname()[1]))


def test_without_an_init_system_nothing_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LISTEN_PID", raising=False)
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert activated_listener() is None

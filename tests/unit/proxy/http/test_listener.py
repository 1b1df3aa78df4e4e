"""The socket that outlives the proxy that serves it."""

from __future__ import annotations

import os
import socket

import pytest

from tracegrad.proxy.http.listener import ListenError, inherited_listener, listen


def test_a_taken_port_is_one_line_with_what_to_do() -> None:
    with listen("127.0.0.1", 0, if_taken="take another") as first:
        port = first.getsockname()[1]
        with pytest.raises(ListenError) as refused:
            listen("127.0.0.1", port, field="proxy.port", if_taken="take another")
    assert str(refused.value) == (f"proxy.port: port {port} of 127.0.0.1 is in use; take another")


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

"""How long a request's body may take, and how much of it is read: tested with raw sockets."""

from __future__ import annotations

import socket
import time

import pytest

from support.proxy.bounded_server import SHORT, SOON, Echo, is_taken, refused
from support.proxy.bounded_server import app as app
from support.proxy.bounded_server import client as client
from support.proxy.bounded_server import reader as reader
from support.proxy.bounded_server import server as server
from support.proxy.raw_http import Reader, bounded, connect
from support.proxy.servers import eventually
from tracegrad.proxy.http.limits import ConnectionLimits


def test_trailers_without_end_are_not_gathered(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n")
    for _ in range(4):
        time.sleep(0.01)
        client.sendall(b"x: y\r\n" * 500)
    assert "trailers" in refused(reader.answer(), 400)


def test_a_trailer_is_no_header(client: socket.socket, reader: Reader) -> None:
    client.sendall(
        b"POST /t HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\nx-tracegrad-rollout: r\r\n\r\n"
    )
    answer = reader.next_answer()
    assert answer.body == b"POST /t 3 host,transfer-encoding"


def test_a_body_that_stops_is_a_408(app: Echo, client: socket.socket, reader: Reader) -> None:
    gone, start = app.gone, time.monotonic()
    client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")
    assert "the body came slower than 4 KiB/s for 0.3 s" in refused(reader.answer(), 408)
    assert reader.ended()
    assert time.monotonic() - start < SOON
    eventually(lambda: app.gone == gone + 1)


def test_a_body_that_waits_for_us_is_not_late(client: socket.socket, reader: Reader) -> None:
    body = b"a" * 1_000_000
    client.sendall(b"POST /late HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    answer = reader.next_answer()
    assert answer.body.startswith(b"POST /late 1000000 ")


def test_a_body_may_be_slow() -> None:
    """It takes many times the window, at the rate that is asked for."""
    limits = ConnectionLimits(body_s=SHORT, body_rate=1000)
    with bounded(Echo(), limits) as url, connect(url) as client:
        client.sendall(b"POST /s HTTP/1.1\r\ncontent-length: 3000\r\n\r\n")
        for _ in range(10):
            client.sendall(b"a" * 300)
            time.sleep(SHORT / 4)
        answer = Reader(client).next_answer()
        assert answer.body == b"POST /s 3000 content-length"


@pytest.mark.parametrize("first", [0, 100_000])
def test_a_body_that_trickles_ends(app: Echo, first: int) -> None:
    """A byte now and then is no progress, however fast the rest of it came."""
    limits = ConnectionLimits(body_s=SHORT, body_rate=1000)
    with bounded(app, limits) as url, connect(url) as client:
        client.sendall(b"POST /s HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + b"a" * first)
        sent = 0
        while is_taken(client, b"a"):
            time.sleep(SHORT / 10)
            sent += 1
            assert sent < 200, "ten windows and more"
        said = refused(Reader(client).answer(), 408)
    assert "slower than 0.976562 KiB/s for 0.3 s" in said
    assert "min_body_kib_s" in said


def test_chunk_headers_are_no_progress(app: Echo) -> None:
    limits = ConnectionLimits(body_s=SHORT, body_rate=1000, head_bytes=1 << 20)
    with bounded(app, limits) as url, connect(url) as client:
        client.sendall(b"POST /s HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        while is_taken(client, b"1;" + b"x" * 500 + b"\r\na\r\n"):
            time.sleep(SHORT / 10)
            sent += 1
            assert sent < 200
        assert "slower than" in refused(Reader(client).answer(), 408)


def test_the_rest_of_a_body_that_nobody_wants_does_not_go_on_for_ever(
    client: socket.socket, reader: Reader
) -> None:
    start = time.monotonic()
    client.sendall(b"POST /early HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    answer = reader.next_answer()
    assert answer.status == 200
    while is_taken(client, b"a"):
        time.sleep(0.02)
        assert time.monotonic() - start < SOON


def test_an_offer_of_http_2_does_not_cost_the_body(client: socket.socket, reader: Reader) -> None:
    """As Java's client makes it."""
    client.sendall(
        b"POST /j HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 3\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
        b"Upgrade: h2c\r\n\r\nabc"
    )
    answer = reader.next_answer()
    assert answer.body.startswith(b"POST /j 3 ")

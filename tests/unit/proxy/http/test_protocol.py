"""What a request's head may be, and how many connections there are: tested with raw sockets."""

from __future__ import annotations

import socket
import time

import pytest

from support.proxy.bounded_server import GET, SHORT, SOON, Echo, is_taken, refused
from support.proxy.bounded_server import app as app
from support.proxy.bounded_server import client as client
from support.proxy.bounded_server import reader as reader
from support.proxy.bounded_server import server as server
from support.proxy.raw_http import Reader, bounded, connect
from support.proxy.servers import eventually
from tracegrad.proxy.http.limits import SPARE_CONNECTIONS, ConnectionLimits


def still_serves(url: str) -> bool:
    with connect(url) as neighbour:
        neighbour.sendall(GET)
        answer = Reader(neighbour).answer()
    return answer is not None and answer.status == 200


MALFORMED = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "odd version": b"GET / HTTP/9.9\r\n\r\n",
    "odd method": b"G\xc3\x8bT / HTTP/1.1\r\n\r\n",
    "connect": b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n",
    "space in the path": b"GET /a b HTTP/1.1\r\n\r\n",
    "null in the path": b"GET /a\x00b HTTP/1.1\r\n\r\n",
    "raw utf-8 in the path": b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
    "line ends without return": b"GET / HTTP/1.1\nhost: x\n\n",
    "no colon": b"GET / HTTP/1.1\r\nfoo bar\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nfoo : bar\r\n\r\n",
    "null in a header": b"GET / HTTP/1.1\r\nfoo: a\x00b\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\ncontent-length: -3\r\n\r\n",
    "no length": b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    "huge length": b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "length and chunks": b"POST / HTTP/1.1\r\ncontent-length: 3\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "odd coding": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, odd\r\n\r\n0\r\n\r\n",
    "odd chunk": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "negative chunk": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_http_is_a_400(
    server: str, client: socket.socket, reader: Reader, raw: bytes
) -> None:
    client.sendall(raw)
    assert "HTTP/1.1" in refused(reader.answer(), 400)
    assert reader.ended()
    assert still_serves(server)


def test_noise_harms_no_neighbour(server: str) -> None:
    with connect(server) as neighbour:
        neighbour.sendall(b"POST /n HTTP/1.1\r\ncontent-length: 4\r\n\r\nab")
        for raw in MALFORMED.values():
            with connect(server) as noisy:
                noisy.sendall(raw)
        neighbour.sendall(b"cd")
        answer = Reader(neighbour).next_answer()
    assert answer.body.startswith(b"POST /n 4 ")


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (b"GET /" + b"a" * 4100 + b" HTTP/1.1\r\n\r\n", 414, "URL is longer than 4096 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 21 + b"\r\n", 431, "more than 20 header fields"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 8200 + b"\r\n\r\n", 431, "larger than 8192 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"b" * 8200 + b": a\r\n\r\n", 431, "larger than 8192 bytes"),
    ],
)
def test_a_head_that_is_too_large_is_refused(
    client: socket.socket, reader: Reader, raw: bytes, status: int, words: str
) -> None:
    client.sendall(raw)
    assert words in refused(reader.answer(), status)
    assert reader.ended()


def test_a_head_that_just_fits_is_served(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 19 + b"b: " + b"c" * 7000 + b"\r\n\r\n")
    answer = reader.next_answer()
    assert answer.status == 200


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\na: ", b"GET /", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_end_is_not_gathered(
    client: socket.socket, reader: Reader, start: bytes
) -> None:
    client.sendall(start)
    for _ in range(4):
        time.sleep(0.01)
        client.sendall(b"b" * 3000)
    assert "larger than 8192 bytes" in refused(reader.answer(), 431)
    assert reader.ended()


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n"])
def test_a_connection_that_asks_nothing_is_closed(
    client: socket.socket, reader: Reader, said: bytes
) -> None:
    start = time.monotonic()
    client.sendall(said)
    assert reader.ended()
    assert SHORT * 0.9 < time.monotonic() - start < SOON


def test_a_head_that_does_not_come_is_a_408(client: socket.socket, reader: Reader) -> None:
    start = time.monotonic()
    for byte in b"GET / HTTP/1.1\r\nhost: x-and-y-and-z\r\n":
        if not is_taken(client, bytes([byte])):
            break
        time.sleep(0.02)  # progress does not help a head
    assert "did not arrive within 0.3 s" in refused(reader.answer(), 408)
    assert time.monotonic() - start < SOON


def test_a_head_has_its_time_also_after_a_slow_body() -> None:
    with bounded(Echo(), ConnectionLimits(head_s=SHORT, body_s=5)) as url, connect(url) as client:
        reader = Reader(client)
        client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\na")
        time.sleep(SHORT + 0.1)
        client.sendall(b"bc")
        assert reader.answer() is not None
        start = time.monotonic()
        client.sendall(b"GET / HT")
        assert "headers did not arrive" in refused(reader.answer(), 408)
        assert time.monotonic() - start < SOON


def test_a_connection_serves_one_request_after_another(
    client: socket.socket, reader: Reader
) -> None:
    for number in range(5):
        client.sendall(b"POST /%d HTTP/1.1\r\ncontent-length: 2\r\n\r\nab" % number)
        answer = reader.next_answer()
        assert answer.body == b"POST /%d 2 content-length" % number
        time.sleep(SHORT / 4)
    start = time.monotonic()
    assert reader.ended()
    assert 0.8 < time.monotonic() - start < SOON, "idle_s"


def test_an_empty_line_after_a_request_buys_no_time() -> None:
    limits = ConnectionLimits(head_s=SHORT, idle_s=60)
    with bounded(Echo(), limits) as url, connect(url) as client:
        reader = Reader(client)
        client.sendall(GET)
        assert reader.answer() is not None
        client.sendall(b"\r\n")
        start = time.monotonic()
        assert reader.ended()
        assert time.monotonic() - start < SOON


@pytest.mark.parametrize("second", [GET.replace(b"/a", b"/b"), b"\x16\x03\x01", b"GET /b HTT"])
def test_what_comes_behind_a_request_in_progress_is_not_served(
    client: socket.socket, reader: Reader, second: bytes
) -> None:
    client.sendall(GET + second)
    answer = reader.next_answer()
    assert answer.body.startswith(b"GET /a")
    assert reader.ended()


def test_an_absolute_url_is_a_path(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"GET http://engine:8000/pause HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = reader.next_answer()
    assert answer.body == b"GET /pause 0 host"


_POST = b"POST /a HTTP/1.1\r\ncontent-length: 300000\r\n"
# Of calls that are refused by their heads: bodies that come with them or behind them, and no body.
BODIES = [
    [_POST + b"\r\n" + b"b" * 1000],
    [_POST, b"\r\n" + b"b" * 100_000],
    [_POST.replace(b"300000", b"4") + b"\r\nabcd\x16\x03\x01"],
]


def test_connections_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    limits = ConnectionLimits(connections=3, head_s=30)
    with bounded(Echo(), limits) as url:
        first = [connect(url) for _ in range(3)]
        for client in first:
            client.sendall(GET)
            assert Reader(client).answer().status == 200  # type: ignore[union-attr]
        with connect(url) as fourth:
            fourth.sendall(GET)
            answer = Reader(fourth).answer()
            assert "too many connections" in refused(answer, 503)
            assert answer is not None
            assert answer.headers["retry-after"] == "1"
        spare = [connect(url) for _ in range(SPARE_CONNECTIONS)]
        for client in spare[:2]:
            client.close()
        for pieces in BODIES:
            with connect(url) as fourth:
                for piece in pieces:
                    fourth.sendall(piece)
                    time.sleep(0.05)
                assert "too many connections" in refused(Reader(fourth).answer(), 503)
        assert not caplog.records
        spare += [connect(url) for _ in range(2)]
        with connect(url) as too_many:
            assert Reader(too_many).ended()
        for client in [*spare, *first]:
            client.close()
        eventually(lambda: still_serves(url))

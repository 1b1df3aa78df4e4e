"""What one connection may take up, told with raw sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from support.proxy_rig import eventually
from support.raw_http import Answer, Reader, bounded, connect
from tracegrad.proxy import wire
from tracegrad.proxy.limits import SPARE_CONNECTIONS, Limits

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
SHORT = 0.3
LIMITS = Limits(
    head_bytes=8192,
    head_fields=20,
    head_s=SHORT,
    body_idle_s=SHORT,
    send_idle_s=SHORT,
    connections=20,
    idle_s=1,
)


class Echo:
    """Says what it was asked. `/flood` never ends; `/early` answers before it has read, `/late`
    reads only after a while."""

    def __init__(self) -> None:
        self.gone = 0
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        if scope["path"] == "/flood":
            await self._flood(receive, send)
            return
        if scope["path"] == "/late":
            await asyncio.sleep(3 * SHORT)
        size, names = 0, [name.decode() for name, _ in scope["headers"]]
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
        body = f"{scope['method']} {scope['path']} {size} {','.join(names)}".encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _flood(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def pour() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
                self.sent += 4096
                await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        assert (await receive())["type"] == "http.disconnect"
        pouring.cancel()
        self.gone += 1


@pytest.fixture(scope="module")
def app() -> Echo:
    return Echo()


@pytest.fixture(scope="module")
def server(app: Echo) -> Iterator[str]:
    with bounded(app, LIMITS, send_buffer=8192) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[socket.socket]:
    with connect(server) as client:
        yield client


@pytest.fixture
def reader(client: socket.socket) -> Reader:
    return Reader(client)


def still_serves(url: str) -> bool:
    with connect(url) as neighbour:
        neighbour.sendall(GET)
        answer = Reader(neighbour).answer()
    return answer is not None and answer.status == 200


def refused(answer: Answer | None, status: int) -> str:
    """What a refusal says; its shape is one that all clients read."""
    assert answer is not None
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    told: dict[str, Any] = answer.json()
    assert told["type"] == "error"
    assert set(told["error"]) == {"message", "type", "param", "code"}
    message: str = told["error"]["message"]
    return message


def is_taken(client: socket.socket, data: bytes) -> bool:
    try:
        client.sendall(data)
    except OSError:
        return False
    return True


def rest_of(client: socket.socket) -> bytes:
    """All that comes before the connection ends, in whichever way."""
    rest = b""
    try:
        while data := client.recv(65536):
            rest += data
    except ConnectionResetError:
        pass
    return rest


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
        answer = Reader(neighbour).answer()
    assert answer is not None
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
    answer = reader.answer()
    assert answer is not None
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
    answer = reader.answer()
    assert answer is not None
    assert answer.body == b"POST /t 3 host,transfer-encoding"


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n"])
def test_a_connection_that_asks_nothing_is_closed(
    client: socket.socket, reader: Reader, said: bytes
) -> None:
    start = time.monotonic()
    client.sendall(said)
    assert reader.ended()
    assert SHORT * 0.9 < time.monotonic() - start < SHORT + 1


def test_a_head_that_does_not_come_is_a_408(client: socket.socket, reader: Reader) -> None:
    start = time.monotonic()
    for byte in b"GET / HTTP/1.1\r\nhost: x-and-y-and-z\r\n":
        if not is_taken(client, bytes([byte])):
            break
        time.sleep(0.02)  # progress does not help a head
    assert "did not arrive within 0.3 s" in refused(reader.answer(), 408)
    assert time.monotonic() - start < SHORT + 1


def test_a_head_has_its_time_also_after_a_slow_body() -> None:
    with bounded(Echo(), Limits(head_s=SHORT, body_idle_s=5)) as url, connect(url) as client:
        reader = Reader(client)
        client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\na")
        time.sleep(SHORT + 0.1)
        client.sendall(b"bc")
        assert reader.answer() is not None
        start = time.monotonic()
        client.sendall(b"GET / HT")
        assert "headers did not arrive" in refused(reader.answer(), 408)
        assert time.monotonic() - start < SHORT + 1


def test_a_body_that_stops_is_a_408(app: Echo, client: socket.socket, reader: Reader) -> None:
    gone, start = app.gone, time.monotonic()
    client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")
    assert "nothing of the body came for 0.3 s" in refused(reader.answer(), 408)
    assert reader.ended()
    assert time.monotonic() - start < SHORT + 1
    eventually(lambda: app.gone == gone + 1, seconds=0.5)


def test_a_body_that_waits_for_us_is_not_late(client: socket.socket, reader: Reader) -> None:
    body = b"a" * 1_000_000
    client.sendall(b"POST /late HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    answer = reader.answer()
    assert answer is not None
    assert answer.body.startswith(b"POST /late 1000000 ")


def test_who_is_refused_may_finish_and_then_read(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"GET /" + b"a" * 4100 + b" HTTP/1.1\r\n\r\n")
    for _ in range(3):
        time.sleep(0.05)
        client.sendall(b"x" * 50_000)
    assert "URL" in refused(reader.answer(), 414)


def test_a_body_may_be_slow(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"POST /s HTTP/1.1\r\ncontent-length: 8\r\n\r\n")
    for _ in range(8):
        time.sleep(SHORT / 3)
        client.sendall(b"a")
    answer = reader.answer()
    assert answer is not None
    assert answer.body == b"POST /s 8 content-length"


def test_a_body_that_trickles_ends(app: Echo) -> None:
    """A byte now and then is progress, and would hold the connection for good."""
    limits = Limits(body_idle_s=SHORT, body_s=3 * SHORT)
    with bounded(app, limits) as url, connect(url) as client:
        start = time.monotonic()
        client.sendall(b"POST /s HTTP/1.1\r\ncontent-length: 1000\r\n\r\n")
        while is_taken(client, b"a"):
            time.sleep(SHORT / 6)
            assert time.monotonic() - start < 10
        took = time.monotonic() - start
        assert "the body has taken more than 0.9 s" in refused(Reader(client).answer(), 408)
    assert took > 2 * SHORT


def test_a_large_body_has_the_time_that_its_size_needs(app: Echo) -> None:
    limits = Limits(body_idle_s=1, body_s=SHORT)
    with bounded(app, limits) as url, connect(url) as client:
        client.sendall(b"POST /s HTTP/1.1\r\ncontent-length: 8192\r\n\r\n")
        for _ in range(8):
            client.sendall(b"a" * 1024)
            time.sleep(SHORT / 4)
        answer = Reader(client).answer()
        assert answer is not None
        assert answer.body == b"POST /s 8192 content-length"


def test_the_rest_of_a_body_that_nobody_wants_does_not_go_on_for_ever(
    client: socket.socket, reader: Reader
) -> None:
    start = time.monotonic()
    client.sendall(b"POST /early HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    answer = reader.answer()
    assert answer is not None
    assert answer.status == 200
    while is_taken(client, b"a"):
        time.sleep(0.02)
        assert time.monotonic() - start < SHORT + 1


def test_a_connection_serves_one_request_after_another(
    client: socket.socket, reader: Reader
) -> None:
    for number in range(5):
        client.sendall(b"POST /%d HTTP/1.1\r\ncontent-length: 2\r\n\r\nab" % number)
        answer = reader.answer()
        assert answer is not None
        assert answer.body == b"POST /%d 2 content-length" % number
        time.sleep(SHORT / 4)
    start = time.monotonic()
    assert reader.ended()
    assert 0.8 < time.monotonic() - start < 3, "idle_s"


def test_an_empty_line_after_a_request_buys_no_time(client: socket.socket, reader: Reader) -> None:
    client.sendall(GET)
    assert reader.answer() is not None
    client.sendall(b"\r\n")
    start = time.monotonic()
    assert reader.ended()
    assert time.monotonic() - start < SHORT + 0.5


@pytest.mark.parametrize("second", [GET.replace(b"/a", b"/b"), b"\x16\x03\x01", b"GET /b HTT"])
def test_what_comes_behind_a_request_in_progress_is_not_served(
    client: socket.socket, reader: Reader, second: bytes
) -> None:
    client.sendall(GET + second)
    answer = reader.answer()
    assert answer is not None
    assert answer.body.startswith(b"GET /a")
    assert reader.ended()


def test_an_offer_of_http_2_does_not_cost_the_body(client: socket.socket, reader: Reader) -> None:
    """As Java's client makes it."""
    client.sendall(
        b"POST /j HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 3\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
        b"Upgrade: h2c\r\n\r\nabc"
    )
    answer = reader.answer()
    assert answer is not None
    assert answer.body.startswith(b"POST /j 3 ")


def test_an_absolute_url_is_a_path(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"GET http://engine:8000/pause HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = reader.answer()
    assert answer is not None
    assert answer.body == b"GET /pause 0 host"


def test_a_client_that_does_not_read_is_dropped(
    app: Echo, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    gone, sent = app.gone, app.sent
    with (
        caplog.at_level(logging.WARNING, "tracegrad.proxy"),
        connect(server, receive_buffer=4096) as client,
    ):
        client.sendall(b"GET /flood HTTP/1.1\r\n\r\n")
        eventually(lambda: app.gone == gone + 1)
    assert app.sent - sent < 1 << 20, "what waits for it is bounded"
    assert "took nothing of its answer for 0.3 s" in caplog.text


def test_a_client_that_reads_slowly_is_not_dropped(app: Echo, server: str) -> None:
    gone = app.gone
    with connect(server, receive_buffer=4096) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\n\r\n")
        until = time.monotonic() + 5 * SHORT
        while time.monotonic() < until:
            assert client.recv(20_000)
            time.sleep(SHORT / 20)
        assert app.gone == gone
    eventually(lambda: app.gone == gone + 1)


def test_an_answer_that_is_not_fetched_keeps_no_connection(server: str) -> None:
    """Too little to pause anybody, too much for the system's buffers, and nothing comes after."""
    size = 40_000

    async def once(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", str(size).encode())
        close = (b"connection", b"close")
        await send({"type": "http.response.start", "status": 200, "headers": [length, close]})
        await send({"type": "http.response.body", "body": b"x" * size})

    with (
        bounded(with_lifespan(once), LIMITS, send_buffer=4096) as url,
        connect(url, receive_buffer=2048) as client,
    ):
        client.sendall(GET)
        time.sleep(3 * SHORT)
        assert len(rest_of(client)) < size


def test_a_whole_answer_may_be_fetched_slowly() -> None:
    size = 600_000

    async def once(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", str(size).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"x" * size})

    with (
        bounded(with_lifespan(once), LIMITS, send_buffer=4096) as url,
        connect(url, receive_buffer=4096) as client,
    ):
        client.sendall(GET)
        got, until = 0, time.monotonic() + 4 * SHORT
        while time.monotonic() < until:
            time.sleep(SHORT / 10)
            got += len(client.recv(8192))
        assert got < size // 2, "it is slow"
        while got < size:
            data = client.recv(65536)
            assert data
            got += len(data)


def with_lifespan(app: Any) -> Any:
    echo = Echo()

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        await (echo if scope["type"] == "lifespan" else app)(scope, receive, send)

    return both


def test_connections_are_bounded() -> None:
    limits = Limits(connections=3, head_s=30)
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
        with connect(url) as too_many:
            assert Reader(too_many).ended()
        for client in [*spare, *first]:
            client.close()
        eventually(lambda: still_serves(url))


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def test_an_answers_head_leaves_with_its_body() -> None:
    transport = Transport()
    together = wire._Together(transport)  # type: ignore[arg-type]
    together.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    together.write(b"HTTP/1.1 200 OK\r\n\r\n")
    together.write(b"HTTP/1.1 is a protocol")
    together.write(b"HTTP/1.1 200 OK is its first line")
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert transport.written == [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        head + b"HTTP/1.1 is a protocol",
        b"HTTP/1.1 200 OK is its first line",
    ]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_an_answer_without_a_body_has_its_head(end: str) -> None:
    transport = Transport()
    together = wire._Together(transport)  # type: ignore[arg-type]
    together.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    getattr(together, end)()
    together.flush()
    assert transport.written == [b"HTTP/1.1 204 No Content\r\n\r\n"]

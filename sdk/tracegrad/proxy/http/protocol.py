"""The server's side of a connection, held to its limits.

uvicorn's own protocol bounds nothing but the pause between requests. This one also bounds the
head of a request, the time that its head and body take to arrive, the time in which a client
takes nothing of its answer, and how many connections there are. Nobody knows the client's
dialect before the head of its request is read: the errors made here have the fields that all of
them read.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, cast

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tracegrad.log_format import writes_json_log
from tracegrad.proxy.http.errors import RETRY_AFTER
from tracegrad.proxy.http.limits import SPARE_CONNECTIONS, ConnectionLimits

log = logging.getLogger("tracegrad.proxy")

# Seconds that calls in flight get to finish after Ctrl-C.
SHUTDOWN_S = 5
# After a refusal the client's remaining bytes are read and dropped for so long: a connection
# closed over unread bytes is reset, and the client would lose the answer too.
LINGER_S = 2.0

# Where a request's scope has its `WriteChunk`: writes a piece of a streamed body at once, and says
# whether the client is behind. None: it cannot yet, or no more; what is sent the ordinary way waits
# for its turn. ASGI's `send` is a coroutine a token in each of several layers.
WRITE_CHUNK = "tracegrad.write_chunk"
WriteChunk = Callable[[bytes], bool | None]
# The same for what is in pieces of HTTP's chunked encoding already.
WRITE_FRAMES = "tracegrad.write_frames"

_upgrade = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)

_CONTINUE = b"HTTP/1.1 100"

# Where a connection is in its current request.
_IDLE, _HEAD, _BODY = range(3)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """uvicorn logs the stack of every call that the proxy's end cuts off, as if it were a fault;
    Starlette says it in a text."""
    if record.exc_info is not None:
        return not isinstance(record.exc_info[1], asyncio.CancelledError)
    return not record.getMessage().rstrip().endswith("asyncio.exceptions.CancelledError")


def server_config(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
    """How uvicorn serves the proxy."""
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=type("BoundedConnection", (BoundedHttpProtocol,), {"limits": limits}),
        ws="none",
        # As JSON its records go where ours go.
        log_config=None if writes_json_log() else LOGGING_CONFIG,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's connection, bounded.

    A request that is pipelined behind one in progress is not served: the connection is closed
    after the first, which HTTP allows and no client of ours will see. uvicorn would not notice
    that the client of the first one hangs up.
    """

    limits: ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stage = _IDLE
        self._deaf = False  # nothing more is read from this client
        self._refused = False
        self._head_size = 0  # bytes of a head that is not complete
        self._wordless = 0  # bytes since the last that were a body's own
        self._due: float | None = self.loop.time() + self.limits.head_s
        self._alarm: asyncio.TimerHandle | None = None
        self._send_alarm: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._watch()
        if len(self.connections) > self.limits.connections + SPARE_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_writer()
        self._unset_keepalive_if_required()
        self._deaf = True
        for alarm in (self._alarm, self._send_alarm):
            if alarm is not None:
                alarm.cancel()

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        head_goes_on = self._stage == _HEAD
        self._wordless += len(data)
        super().data_received(data if self._stage == _BODY else _without_upgrade(data))
        self._check_size(len(data) if head_goes_on else 0)
        self._wait()

    def _check_size(self, of_head: int) -> None:
        """`of_head`: bytes by which a head that is not complete has grown."""
        if self._deaf:  # refused by now
            return
        if self._stage == _HEAD:
            self._head_size += of_head
            if self._head_size > self.limits.head_bytes:
                self._refuse(431, self._too_large())
        elif self._stage == _BODY and self._wordless > self.limits.head_bytes:
            self._refuse(400, "the body consists of chunk extensions or trailers")

    def _wait(self) -> None:
        """Say when the next bytes are due."""
        idle = self._stage != _BODY and not self._answering()
        if idle and self._due is None and self.timeout_keep_alive_task is None:
            self._due = self.loop.time() + self.limits.head_s
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._answering():
            self._deaf = True
            self.cycle.keep_alive = False
        self._stage = _HEAD
        self._head_size = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is no header: it comes after those were judged.
        if self._stage == _HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        if len(self.connections) > self.limits.connections:
            self._refuse(503, "too many connections are open; try again")
        elif len(self.url) > self.limits.head_bytes // 2:
            self._refuse(414, f"the URL is longer than {self.limits.head_bytes // 2} bytes")
        elif len(self.headers) > self.limits.head_fields:
            self._refuse(431, f"there are more than {self.limits.head_fields} header fields")
        elif _size(self.headers) + len(self.url) > self.limits.head_bytes:
            self._refuse(431, self._too_large())
        else:
            super().on_headers_complete()
            self.cycle.transport = CoalescingTransport(self.transport, self.loop)  # type: ignore[assignment]
            scope = cast(dict[str, Any], self.cycle.scope)
            scope[WRITE_CHUNK] = partial(self._write_chunk, self.cycle)
            scope[WRITE_FRAMES] = partial(self._write_frames, self.cycle)
            self._stage = _BODY
            self._wordless = 0
            self._due = self.loop.time() + self.limits.body_s

    def on_body(self, body: bytes) -> None:
        if self._deaf:  # refused by its head, perhaps before there was any cycle
            return
        self._wordless = 0
        if self._due is not None and not self.cycle.response_complete:
            # Each byte buys the time that it may take; no more than `body_s` is ever in store.
            latest = self.loop.time() + self.limits.body_s
            self._due = min(latest, self._due + len(body) / self.limits.body_rate)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stage = _IDLE
        self._due = None
        if not self._deaf:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no request in HTTP/1.1 that can be read")

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _too_large(self) -> str:
        return f"the headers are larger than {self.limits.head_bytes} bytes"

    def _watch(self) -> None:
        """See to it that somebody looks when `_due` has come. One timer serves many requests."""
        if self._due is None or self._deaf:
            return
        if self._alarm is not None:
            if self._alarm.when() <= self._due:
                return
            self._alarm.cancel()
        self._alarm = self.loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._alarm = None
        if self._due is None or self._deaf:
            return
        now = self.loop.time()
        if self.flow.read_paused:  # it is us who do not read
            self._due = now + self.limits.body_s
        if now < self._due:
            self._watch()
        elif self._stage == _IDLE or (self._stage == _BODY and not self._answering()):
            self.transport.close()
        elif self._stage == _HEAD:
            self._refuse(408, f"the headers did not arrive within {self.limits.head_s:g} s")
        else:
            rate = self.limits.body_rate / 1024
            self._refuse(
                408,
                f"the body came slower than {rate:g} KiB/s for {self.limits.body_s:g} s"
                " (min_body_kib_s, body_timeout_s)",
            )

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, which sees a client that hung up; then close."""
        self._deaf = True
        if self._stage != _BODY and self._answering():
            self.cycle.keep_alive = False  # what is wrong comes after a request in progress
            return
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._stage != _BODY or not self.cycle.response_started:
            self.transport.write(_answer(status, message))
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    # What goes out

    def _forget_writer(self) -> None:
        """What a request leaves is freed at once, without Python's search for cycles."""
        if self.cycle is not None:
            for writer in (WRITE_CHUNK, WRITE_FRAMES):
                cast(dict[str, Any], self.cycle.scope).pop(writer, None)

    def _write_chunk(self, cycle: RequestResponseCycle, data: bytes) -> bool | None:
        # A piece of no bytes would end the body.
        return self._write_frames(cycle, b"%x\r\n%b\r\n" % (len(data), data) if data else b"")

    def _write_frames(self, cycle: RequestResponseCycle, frames: bytes) -> bool | None:
        if not cycle.chunked_encoding or cycle.response_complete or self.flow.write_paused:
            return None
        if frames and not cycle.disconnected:
            cycle.transport.write_soon(frames)  # type: ignore[attr-defined]
        return self.flow.write_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_alarm is not None:
            self._send_alarm.cancel()
            self._send_alarm = None

    def on_response_complete(self) -> None:
        self.cycle.transport.flush()  # type: ignore[attr-defined]
        self._forget_writer()
        super().on_response_complete()
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """A transport closes when all is sent; what is left may be too little to pause anybody."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size() > 0:
            self._watch_sending()

    def _watch_sending(self) -> None:
        """To be called when nothing more is written before what is there has gone."""
        if self._send_alarm is not None:
            self._send_alarm.cancel()
        self._unsent = self.transport.get_write_buffer_size()
        self._send_alarm = self.loop.call_later(self.limits.send_idle_s, self._look_at_sending)

    def _look_at_sending(self) -> None:
        self._send_alarm = None
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            log.warning(
                "a client took nothing of its answer for %g s and is dropped",
                self.limits.send_idle_s,
            )
            self.transport.abort()
        elif unsent > 0:
            self._watch_sending()


class CoalescingTransport:
    """A transport that writes the head of an answer with the first of its body.

    uvicorn writes them one after the other, at the price of two system calls and of waking the
    client twice.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None  # empty when it is written
        self._soon: list[bytes] = []

    def write(self, data: bytes) -> None:
        if self._head is None and not data.startswith(_CONTINUE):
            self._head = data
            return
        if self._head or self._soon:
            data = b"".join((self._head or b"", *self._take(), data))
        self._transport.write(data)

    def write_soon(self, data: bytes) -> None:
        """Write `data` when the loop has read what has come from all connections.

        An engine that batches sends a token of each stream at once. A client process that waits
        for several would be woken by each that is passed on before the next one is read.
        """
        if not self._soon:
            self._loop.call_soon(self.flush)
        self._soon.append(data)

    def flush(self) -> None:
        if not self._head and not self._soon:
            return
        data = b"".join((self._head or b"", *self._take()))
        if not self._transport.is_closing():  # the client may have left since; uvloop raises then
            self._transport.write(data)

    def _take(self) -> list[bytes]:
        if self._head:
            self._head = b""
        taken, self._soon = self._soon, []
        return taken

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _without_upgrade(data: bytes) -> bytes:
    """Java's HTTP client offers to speak HTTP/2 in every first request. We may stay with 1.1, but
    httptools drops the request's body as soon as it sees the offer."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if b"pgrade" not in head:
        return data
    return _upgrade.sub(b"\r\nx-upgrade:", head) + end + rest


def _size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of a block of headers, with what stands between them."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _answer(status: int, message: str) -> bytes:
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    body = orjson.dumps({"type": "error", "error": error})
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if status == 503:
        head.append(f"retry-after: {RETRY_AFTER}")
    return "\r\n".join([*head, "", ""]).encode() + body

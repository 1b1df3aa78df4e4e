"""The load generator: so many callers, each with a connection of its own and one call at a time.

HTTP/1.1 by hand on a bare protocol: with two cores, whatever the generator needs is missing to
what is measured.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import cast

import httptools

# Enough for any answer that is not stuck.
CALL_LIMIT_S = 120.0

_WORDS = re.compile(rb'"content": ?"(?!")')


@dataclass(slots=True)
class Sample:
    """One call. Times in seconds from its first byte sent; `first_s` to the first words of it.

    `share` is how much of the answer came: 1 unless the measurement ended before the call.
    """

    total_s: float = 0.0
    first_s: float | None = None
    events: int = 0
    error: str | None = None
    share: float = 1.0
    pause_s: float = 0.0  # before the caller's next call


@dataclass(slots=True)
class Measured:
    """`wall_s`: from the first call to the end of the last, or to the limit."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0
    unfinished: int = 0

    @property
    def good(self) -> list[Sample]:
        return [s for s in self.samples if s.error is None and s.share == 1.0]

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]

    @property
    def calls(self) -> float:
        """Good calls; one that the limit cut short counts by its share."""
        return sum(sample.share for sample in self.samples if sample.error is None)

    def calls_per_s(self, *, ramped: int = 0) -> float:
        """Good calls a second. `ramped`: so many callers began, and so end, one after another:
        over the whole time there were fewer, so count by how long their calls took."""
        good = self.good
        if ramped and good:
            return ramped * len(good) / sum(sample.total_s + sample.pause_s for sample in good)
        return self.calls / self.wall_s if self.wall_s else 0.0


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST of JSON as bytes on the wire."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Caller(asyncio.Protocol):
    """One connection. `call` sends a request and waits for its whole answer."""

    def __init__(self, *, expected_events: int = 0) -> None:
        self._expected = expected_events  # of a whole stream; 0: answers come in one piece
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._done: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._sample = Sample()
        self._start = perf_counter()
        self._head: bytes | None = b""
        self._tail = b""

    async def connect(self, port: int) -> None:
        """A refusal shows in the first call."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", port)
        except OSError as error:
            self._lost = f"cannot connect: {error}"

    async def call(self, data: bytes) -> Sample:
        """Never raises for what the server does: it is in `Sample.error`."""
        if self._lost is not None or self._transport is None:
            return Sample(error=self._lost or "not connected")
        self._begin()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await self._done
        except TimeoutError:
            self._sample.error = f"no end after {CALL_LIMIT_S:g} s"
            self.close()
        self._sample.total_s = perf_counter() - self._start
        return self._sample

    def cut(self) -> Sample:
        """What has come of the call so far, when the measurement ends."""
        share = self._sample.events / self._expected if self._expected else 0.0
        self._sample.share = min(share, 0.999)
        return self._sample

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def lost(self) -> bool:
        return self._lost is not None

    @property
    def busy(self) -> bool:
        return self._done is not None and not self._done.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = f"connection lost: {exc or 'closed by the server'}"
        if self.busy:
            self._end(self._lost)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error!r}")
            self.close()

    # What httptools calls.

    def on_body(self, body: bytes) -> None:
        sample = self._sample
        if self._expected:
            # An empty line that was cut in two counts once.
            sample.events += body.count(b"\n\n") + (self._tail[-1:] == b"\n" == body[:1])
        if self._head is not None:
            self._head += body
            if _WORDS.search(self._head):
                sample.first_s = perf_counter() - self._start
                self._head = None
        self._tail = (self._tail + body)[-32:] if len(body) < 32 else body[-32:]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"status {status}")
        elif self._sample.first_s is None:
            self._end("an answer without words")
        elif self._expected and not self._tail.rstrip().endswith(b"data: [DONE]"):
            self._end("a stream without [DONE]")
        else:
            self._end(None)

    def _end(self, error: str | None) -> None:
        self._sample.error = self._sample.error or error
        if self.busy:
            assert self._done is not None
            self._done.set_result(None)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked, and how often.

    `requests` are taken in turn, as bytes on the wire, until it ends or `issue_s` is over; what
    then runs may end, until `limit_s`. Callers begin one after another within `ramp_s`.
    """

    requests: Iterator[bytes]
    concurrency: int
    issue_s: float
    limit_s: float
    ramp_s: float = 0.0
    expected_events: int = 0  # of a whole stream; 0: answers come in one piece
    pause_s: float = 0.0  # a caller's mean pause between two calls, of even distribution


async def measure(port: int, load: Load) -> Measured:
    """Run the calls. Connections are open before the clock starts, unless callers ramp up:
    servers hang up on a client that connects and says nothing."""
    callers = [Caller(expected_events=load.expected_events) for _ in range(load.concurrency)]
    if not load.ramp_s:
        for caller in callers:
            await caller.connect(port)
    measured = Measured()
    start = perf_counter()
    tasks = [
        asyncio.create_task(_calls(caller, port, load, measured, at, start))
        for at, caller in enumerate(callers)
    ]
    _, pending = await asyncio.wait(tasks, timeout=load.limit_s)
    measured.wall_s = perf_counter() - start
    if pending:
        cut = [caller.cut() for caller in callers if caller.busy]
        measured.unfinished = len(cut)
        measured.samples += cut
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for caller in callers:
        caller.close()
    return measured


async def _calls(
    caller: Caller, port: int, load: Load, measured: Measured, number: int, start: float
) -> None:
    pauses = Random(number)  # the same for every server
    if load.ramp_s:
        await asyncio.sleep(load.ramp_s * number / load.concurrency)
        await caller.connect(port)
    first = True
    while first or perf_counter() - start < load.issue_s:
        first = False
        data = next(load.requests, None)
        if data is None:
            return
        sample = await caller.call(data)
        measured.samples.append(sample)
        if caller.lost:
            return
        if load.pause_s:
            sample.pause_s = pauses.uniform(0, 2 * load.pause_s)
            await asyncio.sleep(sample.pause_s)

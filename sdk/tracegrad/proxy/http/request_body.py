"""Request bodies: one budget of memory for all in flight, and one place that reads them.

A body has its memory before its first byte is read, as far as its length is known, and keeps it
until its request is answered: what is made of it lives as long. One client (a key, or an address
where no key is asked for) gets at most half of the budget.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, Self, TypeVar

from starlette.types import Message, Receive, Scope

from tracegrad.protocol import TRACES_PATH
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.errors import BadRequest, Unavailable
from tracegrad.proxy.http.json_size import (
    count_punctuation,
    count_punctuation_outside_strings,
    parsed_memory,
)
from tracegrad.proxy.http.request import read_body

# Seconds that a body waits for memory, and how many wait at a time; the server's buffers hold some
# 300 KiB of each meanwhile.
WAIT_S = 10.0
WAITING = 1024
# Events are read by one after the other on the event loop: a tenth of what others may hold.
_API_SHARE = 10
# Spans are no JSON, or packed: their route unpacks and counts itself.
_STEP = 256 << 10
# Bytes. To read a body of this size takes a few milliseconds; a thread costs a tenth of one.
LARGE_BODY_BYTES = 256 << 10
# More would only compete for Python's one lock; what waits is bounded by the memory for bodies.
THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestSizeLimits:
    """`body` and `api` (below /api) in bytes; `values` in a body; `memory` in bytes, of all."""

    body: int
    api: int
    values: int
    memory: int

    @classmethod
    def of(cls, settings: ProxySettings) -> Self:
        return cls(
            body=settings.max_body_mib << 20,
            api=settings.max_api_body_mib << 20,
            values=settings.max_values,
            memory=settings.max_bodies_mib << 20,
        )


class WorkerThreads:
    """Threads for what large requests need: the event loop goes on serving the others meanwhile."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tracegrad-large")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """What `work` returns: at once for a request of at most `LARGE_BODY_BYTES`, else from a
        thread."""
        if size <= LARGE_BODY_BYTES:
            return work(*args, **more)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **more))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class MemoryBudget:
    """Memory in bytes, for one event loop. `share`: the most that one client holds."""

    def __init__(self, total: int, *, share: int, wait_s: float = WAIT_S) -> None:
        self.total = self.free = total
        self._share = share
        self._wait_s = wait_s
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[asyncio.Future[None], str, int]] = []

    def lease(self, client: str) -> MemoryLease:
        return MemoryLease(self, client)

    async def acquire(self, client: str, held: int, size: int) -> None:
        """`held`: what the same request has already. Raises BadRequest (413) for what never
        fits, Unavailable for what does not fit soon."""
        if held + size > self._share:
            raise BadRequest(
                f"the body needs {(held + size) >> 20} MiB of memory to be read, and one client has"
                f" {self._share >> 20} MiB (half of max_bodies_mib, or of one worker's part of it)",
                status=413,
                code="body_too_large",
            )
        if self._fits(client, size):
            self._grant(client, size)
            return
        if len(self._waiting) < WAITING:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiter = granted, client, size
            self._waiting.append(waiter)
            try:
                await asyncio.wait([granted], timeout=self._wait_s)
            except asyncio.CancelledError:
                if granted.done():
                    self.give_back(client, size)
                raise
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            if granted.done():
                return
        raise Unavailable(
            "the memory for request bodies (max_bodies_mib) is taken; send it again in a moment",
            code="bodies_full",
        )

    def give_back(self, client: str, size: int) -> None:
        self.free += size
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]
        for waiter in list(self._waiting):
            granted, whose, wanted = waiter
            if self._fits(whose, wanted):
                self._waiting.remove(waiter)
                self._grant(whose, wanted)
                granted.set_result(None)

    def _fits(self, client: str, size: int) -> bool:
        return size <= self.free and self._held[client] + size <= self._share

    def _grant(self, client: str, size: int) -> None:
        self.free -= size
        self._held[client] += size


class MemoryLease:
    """What one request holds of the budget."""

    __slots__ = ("_budget", "_client", "_held")

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._held = 0

    async def acquire(self, size: int) -> None:
        """As `MemoryBudget.acquire`."""
        if size > 0:
            await self._budget.acquire(self._client, self._held, size)
            self._held += size

    def release(self) -> None:
        if self._held:
            self._budget.give_back(self._client, self._held)
            self._held = 0


def lease_of(scope: Scope) -> MemoryLease:
    """Behind the guard, the request's."""
    lease: MemoryLease = scope["tracegrad.lease"]
    return lease


class BodyReader:
    """Reads every request's body, whatever its route."""

    def __init__(self, limits: RequestSizeLimits, workers: WorkerThreads) -> None:
        self._limits = limits
        self._workers = workers
        self._budget = MemoryBudget(limits.memory, share=limits.memory // 2)

    def lease(self, client: str) -> MemoryLease:
        return self._budget.lease(client)

    def memory(self) -> tuple[int, int]:
        """Bytes that bodies take now, and that they may take."""
        return self._budget.total - self._budget.free, self._budget.total

    async def read(
        self, scope: Scope, receive: Receive, lease: MemoryLease, *, most: int | None = None
    ) -> Receive:
        """A `receive` that has the whole body in its first message. `most`: bytes, where fewer
        are taken than the settings say.

        Raises BadRequest (413) for a body that is too large or holds too many values, Unavailable
        where there is no memory for it, ClientDisconnected when the rest of it never comes.
        """
        path = scope["path"]
        in_api = path.startswith("/api/")
        limit, setting = self._limits.body, "max_body_mib"
        if in_api and self._limits.api < limit:
            limit, setting = self._limits.api, "max_api_body_mib"
        if most is not None and most < limit:
            limit, setting = most, "the most that is taken here"
        length = _length(scope["headers"])
        if length is not None:
            if length > limit:
                raise _too_large(limit, setting)
            await lease.acquire(length)
        if length == 0:
            return receive
        counted = receive if length is not None else _counted(receive, limit, setting, lease)
        body = await read_body(counted)
        if path != TRACES_PATH:
            most = self._limits.values // _API_SHARE if in_api else self._limits.values
            await lease.acquire(await self._workers.run(len(body), parsed_size, body, most))
        return _replayed(body, receive)


def parsed_size(body: bytes, most_values: int) -> int:
    """Bytes that a JSON text takes when it is parsed, beside its own. Raises BadRequest: 413 for
    too many values, 400 for a text that Python would read in another encoding than UTF-8, whose
    values nobody has counted then."""
    if not json.detect_encoding(body[:4]).startswith("utf-8"):
        raise BadRequest("the body is not UTF-8, which JSON is sent in")
    found = count_punctuation(body)
    if sum(found) > most_values:
        found = count_punctuation_outside_strings(body, most_values)
    if sum(found) > most_values:
        raise too_many_values(most_values)
    return parsed_memory(body, *found)


def too_many_values(most: int) -> BadRequest:
    return BadRequest(
        f"the body holds more than {most:,} values (max_values)",
        status=413,
        code="body_too_large",
    )


def _too_large(limit: int, setting: str) -> BadRequest:
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
    return BadRequest(
        f"the body is larger than {size} ({setting})", status=413, code="body_too_large"
    )


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Of the body, in bytes; None for one that comes in chunks."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            return None
    return length


def _counted(receive: Receive, limit: int, setting: str, lease: MemoryLease) -> Receive:
    """Takes memory for what comes, step by step."""
    size = taken = 0

    async def counted() -> Message:
        nonlocal size, taken
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit, setting)
        if size > taken:
            step = min(size + _STEP, limit) - taken
            await lease.acquire(step)
            taken += step
        return message

    return counted


def _replayed(body: bytes, receive: Receive) -> Receive:
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return given.pop() if given else await receive()

    return replayed

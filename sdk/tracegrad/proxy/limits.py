"""What one client may take up: of a request's size, of time, of connections.

`wire` holds connections to most of it. The size of a body is for the application to judge
(`check_length`, `limited`), which can answer in the client's dialect.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from starlette.types import Message, Receive

from tracegrad.proxy.errors import BadRequest
from tracegrad.settings import ProxySettings

# Connections beyond the bound that are still told so, before more are dropped without a word.
SPARE_CONNECTIONS = 64
# Files beside the two of each call (the client's connection and the engine's).
OTHER_FILES = 192 + SPARE_CONNECTIONS


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds.

    `idle_s` is the pause between two requests; `head_s` the time from the first byte of a
    request's head, or from the opening of the connection, to the head's last; `body_idle_s` and
    `send_idle_s` are times without progress; a whole body has `body_s`, and a second more for each
    of its KiB.
    """

    head_bytes: int = 64 << 10
    head_fields: int = 128
    head_s: float = 15.0
    body_idle_s: float = 30.0
    body_s: float = 300.0
    send_idle_s: float = 300.0
    connections: int = 4096
    idle_s: int = 75

    @classmethod
    def of(cls, settings: ProxySettings) -> Self:
        return cls(
            head_bytes=settings.max_head_kib << 10,
            head_fields=settings.max_headers,
            head_s=settings.head_timeout_s,
            body_idle_s=settings.body_timeout_s,
            send_idle_s=settings.send_timeout_s,
            connections=settings.max_connections,
            idle_s=settings.idle_timeout_s,
        )


def check_length(headers: Iterable[tuple[bytes, bytes]], limit: int) -> bool:
    """Whether the request says how long its body is. Raises BadRequest (413) if too long."""
    known = False
    for name, value in headers:
        if name == b"content-length":
            known = True
            if int(value) > limit:
                raise _too_large(limit)
        elif name == b"transfer-encoding":
            return False
    return known


def limited(receive: Receive, limit: int) -> Receive:
    """`receive`, raising BadRequest (413) for a body that turns out longer than `limit`."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the body is larger than {limit >> 20} MiB", status=413)


def raise_file_limit(connections: int) -> int:
    """Lets this process open as many files as `connections` need; how many it has files for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    return max(1, min(connections, (soft - OTHER_FILES) // 2))

"""What one client may take up: of a request's size, of time, of connections.

`wire` holds connections to it. How large a body may be is for the application to judge (`bodies`),
which can answer in the client's dialect.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

from tracegrad.proxy.config import ProxySettings

# Connections beyond the bound that still get an answer, before more are dropped without a word.
SPARE_CONNECTIONS = 64
# Files beside the two of each call (the client's connection and the engine's).
OTHER_FILES = 192 + SPARE_CONNECTIONS


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Sizes in bytes, times in seconds.

    `idle_s` is the pause between two requests; `head_s` the time from the first byte of a
    request's head, or from the opening of the connection, to the head's last; `send_idle_s` is a
    time without progress. A body comes at `body_rate` bytes a second or more, on average over any
    `body_s` seconds.
    """

    head_bytes: int = 64 << 10
    head_fields: int = 128
    head_s: float = 15.0
    body_s: float = 30.0
    body_rate: float = 4096.0
    send_idle_s: float = 300.0
    connections: int = 4096
    idle_s: int = 75

    @classmethod
    def of(cls, settings: ProxySettings) -> Self:
        return cls(
            head_bytes=settings.max_head_kib << 10,
            head_fields=settings.max_headers,
            head_s=settings.head_timeout_s,
            body_s=settings.body_timeout_s,
            body_rate=settings.min_body_kib_s * 1024,
            send_idle_s=settings.send_timeout_s,
            connections=settings.max_connections,
            idle_s=settings.idle_timeout_s,
        )


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

"""Sessions with an engine: over TCP, or over the Unix socket of `unix:///path`."""

from __future__ import annotations

import aiohttp

from tracegrad.urls import unix_socket


def session_to(
    url: str, *, timeout: aiohttp.ClientTimeout, keepalive_s: float
) -> aiohttp.ClientSession:
    """For requests to `tracegrad.urls.http_base(url)`, as many at a time as there are."""
    path = unix_socket(url)
    connector: aiohttp.BaseConnector
    if path is None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s)
    else:
        connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=keepalive_s)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    )

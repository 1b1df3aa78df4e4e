"""HTTP to the engine and to the proxy: over TCP, or over the Unix socket of `unix:///path`."""

from __future__ import annotations

import httpx

from tracegrad.urls import http_base, unix_socket


def http_client(url: str, *, timeout_s: float, key: str | None = None) -> httpx.Client:
    """A client for paths under `url`. `key` is sent as a bearer token.

    No connection is kept, so none can be stale, and no proxy of the environment's is asked.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(
        base_url=http_base(url),
        headers={"authorization": f"Bearer {key}"} if key else None,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
        # Reading the certificates takes longer than most calls.
        transport=httpx.HTTPTransport(
            uds=unix_socket(url), verify=url.startswith("https:"), limits=limits, trust_env=False
        ),
        trust_env=False,
    )

"""Which weights an engine serves that has been away."""

from __future__ import annotations

import aiohttp
import orjson

from tracegrad.proxy.engine.upstreams.replica import session_to
from tracegrad.urls import http_base

_TIMEOUT = aiohttp.ClientTimeout(total=5)


async def weight_version(url: str) -> str | None:
    """vLLM's own word for its weights: that of the last push, "default" after a start.

    None where it does not say: its routes for weights are there only when weights are pushed.
    """
    async with (
        session_to(url, timeout=_TIMEOUT, keepalive_s=1) as session,
        session.get(f"{http_base(url)}/weight_info", headers={"connection": "close"}) as answer,
    ):
        if answer.status != 200:
            return None
        state = orjson.loads(await answer.read())
    version = state.get("weight_version") if isinstance(state, dict) else None
    return version if isinstance(version, str) else None

"""Whether an engine has the weights of the last push, in its own word.

An engine that was restarted has those of its start, and its calls would be recorded as of the
version that was pushed. One that is found dead by a call is asked before it gets calls again. One
that comes and goes between two calls is found by a look every second, for no engine starts in less.
"""

from __future__ import annotations

import aiohttp
import orjson

from tracegrad.proxy.engine.upstreams.replica import session_to
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate
from tracegrad.urls import http_base

_TIMEOUT = aiohttp.ClientTimeout(total=5)


class PushedWeights:
    def __init__(self, gate: WeightUpdateGate) -> None:
        self._gate = gate
        self._confirmed: dict[str, int] = {}  # the version that an engine was last seen with

    async def are_current(self, url: str) -> bool:
        """Of an engine that has been away."""
        gate = self._gate
        return not gate.pushes or await weight_version(url) == str(gate.version_at(url))

    async def were_replaced(self, url: str) -> bool:
        """Whether an engine that had the current version has another one. Where the engine's word
        was never that of the proxy (whoever pushes need not tell it), it proves nothing."""
        gate = self._gate
        if not gate.pushes or self._is_pushed_to(url):
            return False
        said = await weight_version(url)
        version = gate.version_at(url)
        if said == str(version):
            self._confirmed[url] = version
            return False
        under_way = self._is_pushed_to(url)
        return not under_way and said is not None and self._confirmed.get(url) == version

    def _is_pushed_to(self, url: str) -> bool:
        """A push is under way."""
        return self._gate.held or self._gate.holds(url)


async def weight_version(url: str) -> str | None:
    """Which weights an engine serves that has been away, in vLLM's own word: that of the last push,
    "default" after a start.

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
    # `7+8`: with version 8 beside it, as a candidate that has a name of its own.
    return version.partition("+")[0] if isinstance(version, str) else None

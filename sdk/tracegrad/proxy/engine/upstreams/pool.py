"""The servers behind the proxy: placing calls, going on to the next, waiting for one to be back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp

from tracegrad.proxy.engine.fair_queue import FairQueue, QueueFull
from tracegrad.proxy.engine.upstreams.base import (
    MODELS_PATH,
    TEXT_ONLY,
    VLLM,
    Capabilities,
    OnSent,
    QueueLimits,
    UpstreamResponse,
    UpstreamTimeouts,
)
from tracegrad.proxy.engine.upstreams.replica import (
    Admit,
    Replica,
    ReplicaDropped,
    ReplicaRefused,
    WasRestarted,
    session_to,
)
from tracegrad.proxy.engine.upstreams.router import UpstreamRouter
from tracegrad.proxy.engine.weight_gate import Canary
from tracegrad.proxy.http.errors import ApiError, Unavailable, UpstreamError
from tracegrad.proxy.shared_counts import SharedCount
from tracegrad.proxy.shared_log import SharedLog

# vLLM's server drops an idle connection after 5 s; we must be the first to let go.
KEEPALIVE_S = 3.0
# How often a call may be dropped without an answer: once by a pooled connection that the server
# closed at the same moment, once by a server that died. A call that servers keep dying of must
# not take them all.
DROPS = 3
# Between looks at servers that are up, for restarts. No engine starts in less.
WATCH_S = 1.0


class UpstreamPool:
    """One or several servers of the same model, with one key.

    Nothing of an answer has been seen before its first byte, so until then a call may go to
    another server, or wait for one, without the client knowing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        kind: Literal["vllm", "openai"] = "vllm",
        api_key: str | None = None,
        timeouts: UpstreamTimeouts | None = None,
        queue: QueueLimits | None = None,
        admit: Admit | None = None,
        restarted: WasRestarted | None = None,
        others: SharedLog | None = None,
        calls: Sequence[SharedCount] = (),
        is_held: Callable[[str], bool] = lambda _: False,
        canary: Callable[[], Canary | None] = lambda: None,
    ) -> None:
        """`urls`: base URLs without `/v1`. `kind`: openai for any compatible server but vLLM.
        `admit(url)`: may a server that was down and is healthy again have calls? Its weights may
        be those of its start. Asked again until it says yes. `restarted(url)`:
        asked now and then of a server that is up. `others`: the other workers of the
        proxy, and `calls` what they and this one have in flight at each server. `is_held(url)`:
        whether a server is to have no new calls for now; `release_held` says that this has changed.
        `canary`: the server that has a candidate's weights.
        """
        if not urls:
            raise ValueError("upstream: no URL given")
        self.capabilities: Capabilities = VLLM if kind == "vllm" else TEXT_ONLY
        self._urls = urls
        self._health = "/health" if kind == "vllm" else MODELS_PATH
        self._own = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeouts = timeouts or UpstreamTimeouts()
        self._queue = queue or QueueLimits()
        self._admit = admit
        self._restarted = restarted
        self._is_held = is_held
        self._canary = canary
        self._watch: asyncio.Task[None] | None = None
        self._waiting = FairQueue(self._queue.max_waiting)
        self._replicas: list[Replica] = []
        self._others = others
        self._calls = calls or [SharedCount() for _ in urls]
        self._placement = UpstreamRouter[Replica]([])

    def open(self) -> None:
        # No limit on the whole: an answer takes as long as it takes, and a client that no longer
        # wants it hangs up, which ends the call here too.
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeouts.connect_s, sock_read=self._timeouts.read_s
        )
        self._replicas = [
            Replica(
                url,
                session_to(url, timeout=timeout, keepalive_s=KEEPALIVE_S),
                health=self._health,
                headers=self._own,
                admit=self._admit,
                on_return=self._waiting.release,
                calls=calls,
                is_held=self._is_held,
            )
            for url, calls in zip(self._urls, self._calls, strict=True)
        ]
        self._placement = UpstreamRouter(self._replicas, others=self._others, canary=self._canary)
        if self._restarted is not None:
            self._watch = asyncio.create_task(self._keep_watch(self._restarted))

    async def _keep_watch(self, restarted: WasRestarted) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            up = [replica for replica in self._replicas if replica.up]
            await asyncio.gather(*(replica.notice_restart(restarted) for replica in up))

    def release_held(self) -> None:
        """Calls that waited for a server are placed again."""
        self._waiting.release()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for replica in self._replicas:
            await replica.close()

    def state(self) -> dict[str, Any]:
        """For health and metrics: `waiting`, and of each server `url`, `up`, `in_flight`."""
        servers = [{"url": r.url, "up": r.up, "in_flight": r.in_flight} for r in self._replicas]
        return {"waiting": len(self._waiting), "servers": servers}

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None,
        headers: Mapping[str, str],
        sticky: str | None = None,
        on_sent: OnSent | None = None,
    ) -> AsyncIterator[UpstreamResponse]:
        """As `Upstream.request`. Raises ApiError: Unavailable when nobody answers in time, 504
        for a silent server, 502 for a broken one."""
        if self._own:
            headers = {**headers, **self._own}
        patience_s = self._queue.max_wait_s
        replica, response, answer = await self._ask(
            method, path, body, headers, sticky, patience_s, on_sent
        )
        try:
            async with response:
                yield answer
        finally:
            replica.leave()

    async def models(self) -> bytes:
        """As `Upstream.models`."""
        replica, response, answer = await self._ask("GET", MODELS_PATH, None, self._own, None, 0)
        try:
            async with response:
                return await answer.read()
        finally:
            replica.leave()

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        sticky: str | None,
        patience_s: float,
        on_sent: OnSent | None = None,
    ) -> tuple[Replica, aiohttp.ClientResponse, UpstreamResponse]:
        deadline: float | None = None
        drops = 0
        while True:
            replica = self._placement.choose(sticky)
            if replica is None:
                now = asyncio.get_running_loop().time()
                deadline = now + patience_s if deadline is None else deadline
                await self._wait(sticky, deadline - now)
                continue
            if on_sent is not None:
                on_sent(replica.url)
            try:
                response, answer = await replica.request(method, path, body, headers)
                return replica, response, answer
            except ReplicaRefused as error:
                replica.mark_down(str(error))
            except ReplicaDropped as error:
                drops += 1
                if drops == DROPS:
                    raise _given_up(replica, error) from error
                if drops > 1:
                    replica.mark_down(str(error))

    async def _wait(self, sticky: str | None, seconds: float) -> None:
        if seconds <= 0:
            raise self._unavailable()
        try:
            await self._waiting.wait(sticky, seconds)
        except QueueFull as error:
            raise self._unavailable(f"{len(self._waiting)} calls wait for it already") from error
        except TimeoutError as error:
            raise self._unavailable() from error

    def _unavailable(self, *more: str) -> Unavailable:
        faults = [
            f"the engine at {r.url} does not answer: {r.fault}"
            if r.fault is not None
            else f"the engine at {r.url} is given new weights"
            for r in self._replicas
        ]
        return Unavailable("; ".join([*faults, *more]), code="upstream_unreachable")


def _given_up(replica: Replica, error: ReplicaDropped) -> ApiError:
    message = f"{DROPS} times an engine took this call and gave no answer, last {replica.url}"
    return UpstreamError(f"{message}: {error}", code="upstream_dropped")

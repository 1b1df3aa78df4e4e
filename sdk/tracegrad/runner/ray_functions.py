"""Agents that are functions, called on the hosts of a Ray cluster: `tracegrad.run(…, ray="auto")`.

Rollouts, their ends and their scores stay with the runner; each call is a task that Ray places
where its resources are free (`function_host.py`). A host that is lost takes its calls with it:
their attempts are `infra_error`, and are made again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tracegrad.context import Rollout
from tracegrad.events import Outcome, Reward, RolloutFinished
from tracegrad.runner.function_call import MAX_REASON, FunctionCall, FunctionEnd
from tracegrad.runner.function_host import (
    HostedCallBegun,
    HostedCallEnd,
    HostedCallReturned,
    Said,
    call_function,
    pickled,
)
from tracegrad.runner.outcomes import Classified
from tracegrad.runner.ray_cluster import RayCluster, amounts, placement, with_default_cpu
from tracegrad.runner.sandbox import SandboxUnavailable
from tracegrad.runner.sent_rollout import SentRollout
from tracegrad.serializer import error_line

log = logging.getLogger("tracegrad.runner")

_SAY_S = 60


class RayFunctions:
    """Of one run.

    Args:
        address: as of `RayCluster`.
        resources: of each call by Ray's names (CPU, GPU, memory in bytes, a cluster's own).
    """

    def __init__(
        self, function: FunctionCall, address: str, resources: Mapping[str, float]
    ) -> None:
        self._function = function
        self._cluster = RayCluster(address, option="ray", resources_option="ray_resources")
        self._demand = with_default_cpu(resources)
        self._remote: Any = None
        self._sent: Any = None  # Ray's reference of the function
        self._running = 0  # calls that have begun
        self._say_at = 0.0

    def connect(self, proxy: str) -> int:
        """Before the run; how many agents have room at once. `proxy`: its URL.

        Raises ValueError: as of `RayCluster`, or the agent cannot be sent.
        """
        self._cluster.join(proxy)
        room = self._cluster.room(self._demand)
        try:
            function = pickled(self._function)
        except Exception as error:
            raise ValueError(
                f"ray: the agent cannot be sent to hosts: {error_line(error, MAX_REASON)}; make"
                " clients, locks and files inside of it"
            ) from None
        # No retries: an attempt is made again as a whole, under another rollout.
        options = {**placement(self._demand), "max_retries": 0, "num_returns": "streaming"}
        self._remote = self._cluster.ray.remote(call_function).options(**options)
        self._sent = self._cluster.ray.put(function)
        return room

    def close(self) -> None:
        self._sent = None
        self._cluster.leave()

    async def call(self, task: Any, opened: Rollout, begun: Callable[[], object]) -> FunctionEnd:
        """Waits until a host has room, however long that takes: hosts may be added."""
        try:
            given = pickled(task)
        except Exception as error:
            line = error_line(error, MAX_REASON)
            why = f"the task cannot be sent to a host: {line}; give plain data"
            return FunctionEnd(Classified(Outcome.ENV_ERROR, why))
        call = self._remote.remote(self._sent, given, SentRollout.of(opened))
        end: HostedCallEnd | None = None
        try:
            end = await self._end(call, opened, begun)
            answer = None if end.answer is None else pickle.loads(end.answer)
            return FunctionEnd(end.found, answer)
        except TimeoutError:
            return FunctionEnd(self._function.timed_out())
        except SandboxUnavailable as error:
            return FunctionEnd(Classified(Outcome.INFRA_ERROR, str(error)[:MAX_REASON]))
        except Exception as error:
            line = error_line(error, MAX_REASON)
            return FunctionEnd(Classified(Outcome.ENV_ERROR, f"the call cannot be made: {line}"))
        finally:
            if end is None:
                # Its process ends, whatever the agent does at the moment.
                with suppress(Exception):
                    self._cluster.ray.cancel(call, force=True)

    async def _end(self, call: Any, opened: Rollout, begun: Callable[[], object]) -> HostedCallEnd:
        """Raises TimeoutError, SandboxUnavailable; and what the host could not be told."""
        some = await self._first(call)
        if isinstance(some, HostedCallEnd):
            return some
        assert isinstance(some, HostedCallBegun), "nothing runs before it"
        host = some.host
        begun()
        self._running += 1
        try:
            async with asyncio.timeout(self._function.timeout_s) as bound:
                while not isinstance(some := await self._next(call, host), HostedCallEnd):
                    match some:
                        case Reward() | RolloutFinished():
                            opened.relay(some)
                        case HostedCallReturned():
                            bound.reschedule(None)
        finally:
            self._running -= 1
        opened.may_have_calls |= some.may_have_calls
        opened.has_inner |= some.has_inner
        return some

    async def _first(self, call: Any) -> Said:
        """Once a host has room. Raises as `_end`."""
        coming = asyncio.ensure_future(self._next(call, None))
        try:
            while not (await asyncio.wait({coming}, timeout=_SAY_S))[0]:
                if self._running == 0 and time.monotonic() >= self._say_at:
                    self._say_at = time.monotonic() + _SAY_S
                    log.warning("all agents wait for a host with %s", amounts(self._demand))
            return coming.result()
        finally:
            coming.cancel()

    async def _next(self, call: Any, host: str | None) -> Said:
        with self._cluster.translated(host):
            async for each in call:
                some: Said = await each
                return some
        raise SandboxUnavailable(f"{'ray' if host is None else f'host {host}'}: a call has no end")

"""The gate of all workers, and their state, as one of them sees it (`endpoints.control_api`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count
from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.capture.recorder import EventWriter
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate, canary_of
from tracegrad.proxy.http.errors import Unavailable
from tracegrad.proxy.workers.group_requests import (
    HEALTH,
    HOLD,
    RELEASE,
    SET_CANARY,
    SET_VERSION,
    STATE,
)


class GroupGate:
    """Asks all workers through the supervisor (`send`), and does itself what any of them asks.

    What is asked first is begun first, in every worker.
    """

    def __init__(
        self, send: Callable[[Json], None], gate: WeightUpdateGate, writer: EventWriter
    ) -> None:
        self._send = send
        self._gate = gate
        self._writer = writer
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[list[Any]]] = {}
        self._doing: set[asyncio.Task[None]] = set()
        self._marking: asyncio.Task[None] | None = None  # the last change of the version

    # Asked for

    async def hold(self, *, ttl_s: float, drain_s: float, upstream: str | None = None) -> int:
        """As `WeightUpdateGate.hold`, once all workers hold: the calls inside of all of them."""
        return sum(await self._of_all(HOLD, ttl_s=ttl_s, drain_s=drain_s, upstream=upstream))

    async def set_version(
        self, version: int, upstream: str | None = None, model: str | None = None
    ) -> None:
        await self._of_all(SET_VERSION, version=version, upstream=upstream, model=model)

    async def set_canary(
        self, upstream: str | None, share: float, model: str | None = None
    ) -> None:
        await self._of_all(SET_CANARY, upstream=upstream, share=share, model=model)

    async def release(self, upstream: str | None = None) -> None:
        await self._of_all(RELEASE, upstream=upstream)

    async def state(self) -> Json:
        # Where nobody answered in time, this one all the same.
        states = await self._of_all(STATE) or [self._gate.state()]
        return self._gate.state() | {
            "held": any(state["held"] for state in states),
            "in_flight": sum(state["in_flight"] for state in states),
            "waiting": sum(state["waiting"] for state in states),
        }

    async def health(self) -> Json:
        """For `/healthz`. `workers` are those that answered, by their process ids."""
        states = await self._of_all(HEALTH) or [self._health()]
        loads = [state["writer"] for state in states]
        return {
            "status": "ok",
            "version": self._gate.version,
            "writer": {name: sum(load[name] for load in loads) for name in loads[0]},
            "workers": sorted(state["pid"] for state in states),
        }

    async def _of_all(self, asked: str, **args: float | str | None) -> list[Any]:
        number = next(self._numbers)
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send({"ask": asked, "args": args, "number": number})
        try:
            return await answer
        finally:
            del self._asked[number]

    # Sent by the supervisor

    def received(self, message: Json) -> None:
        if "do" in message:
            task = asyncio.get_running_loop().create_task(self._do(message))
            self._doing.add(task)
            task.add_done_callback(self._doing.discard)
            if message["do"] == SET_VERSION:
                self._marking = task
        elif (answer := self._asked.get(message["answer"])) is not None and not answer.done():
            answer.set_result(message["results"])

    def closed(self) -> None:
        """The supervisor has ended."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Unavailable("the proxy is being stopped", code="stopping"))

    async def _do(self, message: Json) -> None:
        result = await self._result(message["do"], message["args"])
        self._send({"done": message["do"], "number": message["number"], "result": result})

    async def _result(self, asked: str, args: Json) -> Any:
        if asked == HOLD:
            return await self._gate.hold(**args)
        if asked == SET_VERSION:
            return await self._gate.set_version(**args)
        if asked == RELEASE:
            # A worker that starts meets both at once: no call may come in between.
            if self._marking is not None:
                await asyncio.wait([self._marking])
            return self._gate.release(**args)
        if asked == SET_CANARY:
            return self._gate.set_canary(canary_of(**args))
        if asked == STATE:
            return self._gate.state()
        return self._health()

    def _health(self) -> Json:
        return {"pid": os.getpid(), "writer": self._writer.load()._asdict()}

"""Sandboxes that are ready before they are asked for: the next one starts while an agent runs.

A used one is handed out again only where its spec says `resettable`. Closing takes nobody's time:
it goes on beside the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from tracegrad.runner.sandbox import Sandbox, SandboxError, SandboxSpec, SandboxUnavailable
from tracegrad.runner.warm_pool_state import Action, Close, Hand, Refuse, Start, WarmPoolState

log = logging.getLogger("tracegrad.runner")

IDLE_S = 120.0  # how long one stays ready that nobody takes
_TICK_S = 5.0
_Ticket = asyncio.Future["PoolableSandbox"]


class PoolableSandbox(Sandbox, Protocol):
    """`on_close`: what `close` does, where it is not the sandbox's end."""

    on_close: Callable[[], Awaitable[None]] | None

    async def alive(self) -> bool:
        """Whether it can be handed out."""
        ...

    async def reset(self) -> None:
        """As it began, as far as its image promises that. Raises SandboxError."""
        ...

    async def destroy(self) -> None:
        """Its end; may be called again."""
        ...


class PoolableBackend(Protocol):
    async def start(self, spec: SandboxSpec) -> PoolableSandbox:
        """Raises SandboxError. A cancellation leaves nothing behind, and is raised."""
        ...

    async def close(self) -> None: ...


class WarmPool:
    """A backend whose sandboxes are another one's.

    Args:
        size: ready and starting ones of each spec; total: of all specs.
    """

    def __init__(
        self, backend: PoolableBackend, *, size: int, total: int, idle_s: float = IDLE_S
    ) -> None:
        self._backend = backend
        self._state: WarmPoolState[SandboxSpec, PoolableSandbox, _Ticket] = WarmPoolState(
            size=size,
            total=total,
            idle_s=idle_s,
            comes_back=lambda spec: spec.resettable,
        )
        self._working: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[None]] = set()  # of them
        self._ticking: asyncio.Task[None] | None = None

    def ready(self, spec: SandboxSpec) -> int:
        """How many of its sandboxes wait for an attempt."""
        return self._state.ready(spec)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A ready one that lives, else the next that becomes ready. Raises SandboxError."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        first = False
        while True:
            sandbox = await self._handed(spec, first=first)
            if await self._lives(sandbox):
                sandbox.on_close = partial(self._closed, spec, sandbox)
                return sandbox
            log.info("a warm sandbox had died, and another one is taken")
            self._spawn(sandbox.destroy())
            first = True

    async def close(self) -> None:
        """Of all of them, also those that attempts have yet."""
        self._do(self._state.drained(SandboxUnavailable("the runner ends")))
        if self._ticking is not None:
            self._ticking.cancel()
        for starting in self._starting:  # an image may be built for it, which takes its time
            starting.cancel()
        while self._working:
            await asyncio.wait(self._working)
        await self._backend.close()

    async def _handed(self, spec: SandboxSpec, *, first: bool) -> PoolableSandbox:
        ticket: _Ticket = asyncio.get_running_loop().create_future()
        self._do(self._state.asked(spec, ticket, first=first))
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._put_back(spec, ticket.result())
            else:
                self._do(self._state.gave_up(spec, ticket))
            raise

    async def _lives(self, sandbox: PoolableSandbox) -> bool:
        try:
            return await sandbox.alive()
        except asyncio.CancelledError:
            self._spawn(sandbox.destroy())
            raise

    async def _closed(self, spec: SandboxSpec, sandbox: PoolableSandbox) -> None:
        """An attempt has ended; it does not wait for what follows."""
        sandbox.on_close = _nothing
        self._spawn(self._reuse(spec, sandbox) if spec.resettable else sandbox.destroy())

    async def _reuse(self, spec: SandboxSpec, sandbox: PoolableSandbox) -> None:
        try:
            await sandbox.reset()
        except SandboxError as error:
            log.info("a sandbox could not be reset, and is removed: %s", error)
            await sandbox.destroy()
        else:
            self._put_back(spec, sandbox)

    def _put_back(self, spec: SandboxSpec, sandbox: PoolableSandbox) -> None:
        self._do(self._state.returned(spec, sandbox, time.monotonic()))

    def _do(self, actions: list[Action[SandboxSpec, _Ticket, PoolableSandbox]]) -> None:
        for action in actions:
            match action:
                case Start(spec):
                    starting = self._spawn(self._start(spec))
                    self._starting.add(starting)
                    starting.add_done_callback(self._starting.discard)
                case Hand(ticket, sandbox):
                    if ticket.done():  # cancelled at this moment
                        self._spawn(sandbox.destroy())
                    else:
                        ticket.set_result(sandbox)
                case Refuse(ticket, error):
                    if not ticket.done():
                        ticket.set_exception(error)
                case Close(sandbox):
                    self._spawn(sandbox.destroy())

    async def _start(self, spec: SandboxSpec) -> None:
        try:
            sandbox = await self._backend.start(spec)
        except Exception as error:  # whoever waits gets it
            self._do(self._state.failed(spec, error))
        else:
            self._do(self._state.started(spec, sandbox, time.monotonic()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._do(self._state.time(time.monotonic()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a sandbox's end: %s", error)


async def _nothing() -> None:
    pass

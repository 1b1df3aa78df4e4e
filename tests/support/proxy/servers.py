"""What tests of the proxy share: servers on free ports, and a writer that can be held back."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import uvicorn
from starlette.types import Receive, Scope, Send

from support.engines.mock_engine import MockEngine
from tracegrad.events import Event
from tracegrad.store import GroupCommitWriter, StoreUnavailable, Submission, WriterLoad

# Of proxies whose tests push weights, and how it is sent.
CONTROL_KEY = "control-key-of-tests"
CONTROL = {"authorization": f"Bearer {CONTROL_KEY}"}


@contextmanager
def serving(app: Any, lifespan: Literal["auto", "off"] = "auto") -> Iterator[str]:
    """The application on a free port, in a thread; its URL."""
    config = uvicorn.Config(app, log_level="critical", lifespan=lifespan)
    with running(config, socket.create_server(("127.0.0.1", 0), backlog=256)) as url:
        yield url


class PromptServer(uvicorn.Server):
    """Ends when it is told to. uvicorn looks ten times a second whether it should, and then waits
    a tenth at least for its connections: most of the time that a short test takes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._told.wait()

    def stop(self) -> None:
        """From another thread."""
        self._loop.call_soon_threadsafe(self._told.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        for closing in (*self.servers, *(sockets or [])):
            closing.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                for server in self.servers:
                    await server.wait_closed()
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextmanager
def running(config: uvicorn.Config, listener: socket.socket) -> Iterator[str]:
    """uvicorn in a thread; its URL."""
    config.timeout_graceful_shutdown = 1
    server = PromptServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server died at its start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(60)
        listener.close()


def eventually(check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `check`."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return value


class HeldWriter:
    """The store's own writer behind a door that a test can close."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0
        self.broken = False

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def load(self) -> WriterLoad:
        return self._writer.load()

    def submit(self, facts: Sequence[Event]) -> Submission:
        if self.broken:
            failed = Submission()
            failed.set_exception(StoreUnavailable("disk is full"))
            return failed
        if self._open.is_set():
            return self._writer.submit(facts)
        done = Submission()
        self.waiting += 1
        threading.Thread(target=self._later, args=(facts, done), daemon=True).start()
        return done

    def _later(self, facts: Sequence[Event], done: Submission) -> None:
        self._open.wait(10)
        self._writer.submit(facts).result()
        done.set_result(None)


class EngineServer:
    """One server for all tests; the engine that answers is the test's own."""

    engine: MockEngine
    url: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.engine.app()(scope, receive, send)

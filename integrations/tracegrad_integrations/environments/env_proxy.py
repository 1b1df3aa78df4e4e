"""The proxy in this process, for agents that are environments: its engine is who steps them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import uvicorn

from tracegrad import exporter
from tracegrad.proxy.app import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.proxy.http.protocol import server_config
from tracegrad.store import GroupCommitWriter, Store
from tracegrad_integrations.environments.action_upstream import ActionUpstream

T = TypeVar("T")

_URL = "TRACEGRAD_URL"
DEFAULT_STORE = "sqlite:///.tracegrad/environments.db"


class EnvProxy:
    """`with EnvProxy() as proxy:`, for any number of environments.

    Serves on a free port of the loopback, which TRACEGRAD_URL names meanwhile: of this process and
    of those that it starts, all rollouts lead here. One at a time in a process.
    """

    _opened = threading.Lock()

    def __init__(self, store: str = DEFAULT_STORE) -> None:
        """`store`: where turns, rewards and outcomes are kept; a URL."""
        self._store = store
        self.upstream = ActionUpstream()
        self.url = ""
        self._scope = ExitStack()
        # Agents that are coroutines may block it; the proxy has a loop of its own.
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        """Raises ValueError: another one is open; `store` cannot be used."""
        if not self._opened.acquire(blocking=False):
            raise ValueError("EnvProxy: one is open in this process; give it to all environments")
        with ExitStack() as scope:
            scope.callback(self._opened.release)
            self._serve(scope)
            scope.callback(_set_variable, os.environ.get(_URL))
            _set_variable(self.url)
            scope.callback(exporter.flush)
            attempts = threading.Thread(target=self._loop.run_forever, daemon=True)
            attempts.start()
            scope.callback(self._end_attempts, attempts)
            self._scope = scope.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """On the event loop of the attempts."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self, scope: ExitStack) -> None:
        settings = ProxySettings(store=self._store)
        store = scope.enter_context(Store.open(settings.store))
        writer = scope.enter_context(GroupCommitWriter(store))
        app = create_app(settings, store=store, writer=writer, upstream=self.upstream)
        listener = scope.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        server = uvicorn.Server(server_config(app, ConnectionLimits.of(settings)))
        serving = threading.Thread(target=server.run, args=([listener],), daemon=True)
        serving.start()
        while not server.started:
            if not serving.is_alive():
                raise ValueError("EnvProxy: the proxy did not start; its log says why")
            time.sleep(0.01)

        def stop() -> None:
            server.should_exit = True
            serving.join()

        scope.callback(stop)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _end_attempts(self, thread: threading.Thread) -> None:
        for calls in [*self.upstream.calls.values()]:
            calls.close()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _set_variable(url: str | None) -> None:
    if url is None:
        os.environ.pop(_URL, None)
    else:
        os.environ[_URL] = url

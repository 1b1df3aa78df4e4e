"""What the engine says of containers while they run: ends of commands, of memory, their death.

One connection for all of them, read by a thread. Where it breaks it is made again; who waits for an
event asks the engine itself from time to time, so that one that was missed is only late.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import requests.exceptions
import urllib3.exceptions
from docker.errors import DockerException

from tracegrad.runner.docker_engine import DockerEngine

log = logging.getLogger("tracegrad.runner")
_AGAIN_S = 0.5


class ContainerWatch:
    """Of one container. `out_of_memory`: how often its bound was hit so far."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.out_of_memory = 0
        self._ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def ended(self, exec_id: str) -> asyncio.Event:
        """Set when the command has ended."""
        return self._ended[exec_id]

    def forget(self, exec_id: str) -> None:
        self._ended.pop(exec_id, None)

    def take(self, action: str, attributes: Mapping[str, str]) -> None:
        if action in ("exec_die", "exec_died"):  # Podman's word
            self._ended[attributes.get("execID", "")].set()
        elif action == "oom":
            self.out_of_memory += 1
        elif action in ("die", "died"):
            self.died.set()


class ContainerEvents:
    """`label`: that of the containers, `name=value`."""

    def __init__(self, engine: DockerEngine, label: str) -> None:
        self._engine, self._label = engine, label
        self._watches: dict[str, ContainerWatch] = {}
        self._loop = asyncio.get_running_loop()
        self._stream: Any = None
        self._closed = False
        self._thread = threading.Thread(
            target=self._read, name="tracegrad-docker-events", daemon=True
        )

    async def open(self) -> None:
        """Raises docker's APIError, SandboxUnavailable."""
        told = await self._engine.call(self._engine.api.info)
        self._since = int(_epoch(told["SystemTime"]))
        self._stream = await self._engine.call(self._connect)
        self._thread.start()

    def watch(self, container: str) -> ContainerWatch:
        return self._watches.setdefault(container, ContainerWatch())

    def unwatch(self, container: str) -> None:
        self._watches.pop(container, None)

    async def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            with suppress(Exception):
                self._stream.close()
            await asyncio.to_thread(self._thread.join)

    def _connect(self) -> Any:
        return self._engine.api.events(
            since=self._since,
            filters={"type": "container", "label": self._label},
            decode=True,
        )

    def _read(self) -> None:
        while not self._closed:
            try:
                if self._stream is None:
                    self._stream = self._connect()
                for event in self._stream:
                    self._since = int(event["time"])
                    with suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self._take, event)
            except (
                DockerException,
                requests.exceptions.RequestException,
                urllib3.exceptions.HTTPError,
                OSError,
                ValueError,  # half a line
            ) as error:
                if not self._closed:
                    log.debug("the engine's events broke off: %s", error)
            self._stream = None
            if not self._closed:
                time.sleep(_AGAIN_S)

    def _take(self, event: Mapping[str, Any]) -> None:
        watch = self._watches.get(event["Actor"]["ID"])
        if watch is not None:
            # Some have their subject behind the name: `exec_start: true`.
            action = str(event["Action"]).partition(":")[0]
            watch.take(action, event["Actor"].get("Attributes") or {})


def _epoch(iso: str) -> float:
    """Docker writes nanoseconds, for which there is no room in a datetime."""
    whole, _, rest = iso.partition(".")
    zone = rest.lstrip("0123456789") or "Z"
    return datetime.fromisoformat(whole.removesuffix("Z") + zone.replace("Z", "+00:00")).timestamp()

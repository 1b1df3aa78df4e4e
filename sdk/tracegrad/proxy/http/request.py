"""The client's side of a call: its body, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope

Headers = Mapping[str, str]


class ClientDisconnected(Exception):
    """The client hung up before its answer was complete."""


def headers_of(scope: Scope) -> dict[str, str]:
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}


async def read_body(receive: Receive) -> bytes:
    """Raises ClientDisconnected when the rest of it never comes. The guard has bounded it."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Ends what runs inside with ClientDisconnected as soon as the client hangs up.

    To be entered after the body has been read.
    """
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # A server that shuts down cancels too; that is not ours to swallow.
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()

"""What is new, told to a page that is open: native EventSource, one message a connection.

The answer ends after its message, and the browser asks again after `retry`: no connection is held,
so that none keeps the proxy from stopping, and it does not matter which worker answers.
"""

from __future__ import annotations

from starlette.responses import Response

RETRY_MS = 3_000
# Where an answer took all the time that it may.
SLOW_RETRY_MS = 30_000


def event(name: str, data: str, *, slow: bool = False) -> Response:
    """A message, and when the browser is to ask again. `data` is one line."""
    assert "\n" not in data
    return Response(
        f"retry: {SLOW_RETRY_MS if slow else RETRY_MS}\nevent: {name}\ndata: {data}\n\n",
        media_type="text/event-stream",
        headers={"cache-control": "no-store"},
    )


def nothing() -> Response:
    """Nothing can be said now; ask again."""
    return Response(f"retry: {SLOW_RETRY_MS}\n: later\n\n", media_type="text/event-stream")

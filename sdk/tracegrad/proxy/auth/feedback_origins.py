"""Lets web pages of named origins post feedback from a browser: CORS, for that one path."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tracegrad.protocol import FEEDBACK_PATH

_PREFLIGHT_S = 600  # for which a browser need not ask again


class FeedbackOrigins:
    """ASGI middleware, around the guard: a browser asks first, without a key, and is to see the
    guard's refusals too. No cookie comes along: who posts has a key, or the proxy asks for none."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._shared = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["POST"],
            allow_headers=["authorization", "content-type", "idempotency-key"],
            max_age=_PREFLIGHT_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_feedback = scope["type"] == "http" and scope["path"] == FEEDBACK_PATH
        await (self._shared if is_feedback else self._app)(scope, receive, send)

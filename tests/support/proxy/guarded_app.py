"""An application behind the proxy's authentication."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request

from support.proxy.key_store import Cupboard
from tracegrad.proxy.auth.middleware import Authenticator, AuthMiddleware, caller_of, engine_headers
from tracegrad.proxy.auth.rollout_keys import RolloutKeyService
from tracegrad.proxy.endpoints.control_api import add_error_handlers, make_keys_router
from tracegrad.proxy.http.request_body import BodyReader, RequestSizeLimits, WorkerThreads

ADMIN = "the-admin's-own-key"


LIMIT = 1000


METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def a_proxy(admin_key: str | None, cupboard: Cupboard) -> FastAPI:
    """The guard before an application that tells who was let in, at any path."""
    app = FastAPI(openapi_url=None)
    add_error_handlers(app, lambda _, error: error.body())
    access = Authenticator(admin_key, RolloutKeyService(cupboard))
    app.include_router(make_keys_router(access))

    @app.post("/api/events")
    async def events(body: Annotated[Any, Body()]) -> int:
        return len(body)

    async def anything(request: Request) -> dict[str, Any]:
        caller = caller_of(request.scope)
        return {
            "rollout": caller.rollout_id,
            "bound": caller.bound,
            "to_engine": engine_headers(caller).get("authorization"),
            "size": len(await request.body()),
        }

    app.add_api_route("/{path:path}", anything, methods=METHODS)
    app.add_middleware(
        AuthMiddleware,
        access=access,
        bodies=BodyReader(RequestSizeLimits(LIMIT, LIMIT, LIMIT, 1 << 20), WorkerThreads()),
        shape=lambda path, error: json.dumps({"at": path, "says": error.message}).encode(),
    )
    return app

"""The proxy as an ASGI application: its rooms, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from tracegrad.proxy.api import add_error_handlers, make_router
from tracegrad.proxy.attribution import TraceMap
from tracegrad.proxy.calls import ChatCompletions, Models
from tracegrad.proxy.collector import Traces
from tracegrad.proxy.continuation import Continuation
from tracegrad.proxy.gate import Gate
from tracegrad.proxy.recorder import Recorder, SubmitsFacts
from tracegrad.proxy.upstream import Upstream
from tracegrad.settings import ProxySettings
from tracegrad.store import Store


def create_app(settings: ProxySettings, *, store: Store, writer: SubmitsFacts) -> FastAPI:
    """`store` is read, `writer` writes to it; both stay open, and are the caller's to close."""
    key = settings.upstream_api_key
    upstream = Upstream(settings.upstream, api_key=key.get_secret_value() if key else None)
    traces = TraceMap()
    continuation = Continuation(store, limit_bytes=settings.cache_mib << 20)
    recorder = Recorder(writer, continuation, traces)
    gate = Gate(version=store.current_version() or 0, held=settings.held)
    limit = settings.max_body_mib << 20

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        upstream.open()
        yield
        await upstream.close()

    app = FastAPI(
        title="tracegrad proxy",
        description="LLM calls, spans and rewards of agents, recorded for training.",
        lifespan=lifespan,
    )
    add_error_handlers(app)
    # First in line, before FastAPI's own routes: most requests are theirs.
    app.router.routes[:0] = _hot_routes(
        chat=ChatCompletions(upstream, gate, recorder, model=settings.model, max_body_bytes=limit),
        models=Models(upstream),
        spans=Traces(recorder, traces, max_body_bytes=limit),
    )
    app.router.routes.append(_health(gate))
    app.include_router(make_router(recorder, gate))
    return app


def _hot_routes(*, chat: ASGIApp, models: ASGIApp, spans: ASGIApp) -> list[BaseRoute]:
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/rollouts/{rollout}/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/traces", spans, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/rollouts/{rollout}/v1/models", models, methods=["GET"]),
    ]


def _health(gate: Gate) -> Route:
    async def healthz(_: Request) -> Response:
        body = orjson.dumps({"status": "ok", "version": gate.version})
        return Response(body, media_type="application/json")

    return Route("/healthz", healthz)

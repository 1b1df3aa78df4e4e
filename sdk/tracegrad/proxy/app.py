"""The proxy as an ASGI application: its rooms, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from fastapi import FastAPI
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from tracegrad.proxy.access import Access, Guard, make_keys_router
from tracegrad.proxy.api import add_error_handlers, make_router
from tracegrad.proxy.attribution import TraceMap
from tracegrad.proxy.calls import Calls, Rooms
from tracegrad.proxy.collector import Ingest, Traces
from tracegrad.proxy.continuation import Continuation, EngineText
from tracegrad.proxy.counting import Counts
from tracegrad.proxy.dialects import gemini, messages
from tracegrad.proxy.dialects.base import Dialect
from tracegrad.proxy.dialects.chat import Chat
from tracegrad.proxy.dialects.completions import Completions
from tracegrad.proxy.dialects.responses import Responses
from tracegrad.proxy.errors import ApiError
from tracegrad.proxy.gate import Gate
from tracegrad.proxy.keys import Keys
from tracegrad.proxy.models import gemini_models, models
from tracegrad.proxy.openapi import described
from tracegrad.proxy.passed_on import PassedOn, Shape
from tracegrad.proxy.recorder import Recorder, SubmitsFacts
from tracegrad.proxy.redaction import Redactor, load_hooks
from tracegrad.proxy.repeats import Repeats
from tracegrad.proxy.upstreams import Queue, Timeouts, Upstream, Upstreams
from tracegrad.proxy.upstreams.weights import weight_version
from tracegrad.settings import ProxySettings
from tracegrad.store import Store

# Seconds of silence after which a stream says something. Clients give up after 120 or more
# (Qwen Code 120, most others 300); proxies on the way often after 60.
KEEPALIVE_S = 15.0


class ModelName(PathConvertor):
    """May hold slashes; what follows a colon is a method of Google's."""

    regex = "[^:]+"


register_url_convertor("model_name", ModelName())


def create_app(settings: ProxySettings, *, store: Store, writer: SubmitsFacts) -> FastAPI:
    """`store` is read, `writer` writes to it; both stay open, and are the caller's to close."""
    gate = Gate(
        version=store.current_version() or 0,
        held=settings.held,
        max_waiting=settings.max_waiting,
        max_wait_s=settings.max_wait_s,
    )
    upstream = _upstream(settings, gate)
    traces = TraceMap()
    exact = upstream.capabilities.exact_prompts
    text = EngineText(settings.tokenizer, upstream.models) if exact else None
    continuation = Continuation(store, limit_bytes=settings.cache_mib << 20, text=text)
    redactor = Redactor(load_hooks(settings.redact), keep_text=settings.keep_text)
    recorder = Recorder(writer, store, continuation, traces, redactor)
    admin = settings.admin_key
    access = Access(admin.get_secret_value() if admin else None, Keys(store))
    limit = settings.max_body_mib << 20
    rooms = Rooms(
        upstream=upstream,
        gate=gate,
        recorder=recorder,
        traces=traces,
        repeats=Repeats(),
        model=settings.model,
        free_sampling=settings.sampling == "free" and upstream.capabilities.tokens,
        routed_experts=settings.routed_experts,
        max_body_bytes=limit,
        keepalive_s=KEEPALIVE_S,
    )

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
    add_error_handlers(app, _shape)
    # First in line, before FastAPI's own routes: most requests are theirs.
    ingest = Ingest(recorder, continuation, traces, store)
    app.router.routes[:0] = _hot_routes(rooms, Traces(ingest, max_body_bytes=limit))
    app.router.routes.append(_health(gate))
    app.include_router(make_router(recorder, gate))
    app.include_router(make_keys_router(access))
    described(app)
    app.add_middleware(Guard, access=access, max_body_bytes=limit, shape=_shape)
    return app


def _upstream(settings: ProxySettings, gate: Gate) -> Upstream:
    key = settings.upstream_api_key
    api_key = key.get_secret_value() if key else None
    timeouts = Timeouts(read_s=settings.read_timeout_s)
    if settings.upstream_kind == "litellm":
        # An extra of its own, and slow to import.
        from tracegrad.proxy.upstreams.litellm import LiteLLM

        base = settings.upstream if "upstream" in settings.model_fields_set else None
        return LiteLLM(model=settings.model, api_base=base, api_key=api_key, timeouts=timeouts)

    async def serves_the_current_weights(url: str) -> bool:
        # An engine that was restarted has the weights of its start, until the next push.
        return not gate.pushes or await weight_version(url) == str(gate.version)

    return Upstreams(
        settings.upstreams,
        kind=settings.upstream_kind,
        api_key=api_key,
        timeouts=timeouts,
        queue=Queue(settings.max_waiting, settings.max_wait_s),
        admit=serves_the_current_weights,
    )


def _hot_routes(rooms: Rooms, spans: ASGIApp) -> list[BaseRoute]:
    def passed_on(method: str, path: str, shape: Shape | None = None) -> ASGIApp:
        limit = rooms.max_body_bytes
        return PassedOn(rooms.upstream, method, path, max_body_bytes=limit, shape=shape)

    claude, google = messages.Messages(), gemini.Gemini()
    count = Counts(claude, rooms, parse=messages.count_request, shape=messages.count_answer)
    count_google = Counts(google, rooms, parse=gemini.count_request, shape=gemini.count_answer)
    served: list[tuple[str, str, ASGIApp]] = [
        ("POST", "/v1/chat/completions", Calls(Chat(), rooms)),
        ("POST", "/v1/messages", Calls(claude, rooms)),
        ("POST", "/v1/responses", Calls(Responses(), rooms)),
        ("POST", "/v1/completions", Calls(Completions(), rooms)),
        ("POST", "/v1/messages/count_tokens", count),
        ("POST", "/v1/embeddings", passed_on("POST", "/v1/embeddings")),
        ("GET", "/v1/models", passed_on("GET", "/v1/models", models)),
        ("GET", "/v1/models/{model:model_name}", passed_on("GET", "/v1/models", models)),
        ("GET", "/v1beta/models", passed_on("GET", "/v1/models", gemini_models)),
    ]
    for version in ("v1beta", "v1"):  # Gemini CLI's, and that of google-genai 3
        path = f"/{version}/models/{{model:path}}"
        served.append(("POST", f"{path}:countTokens", count_google))
        served.append(("POST", f"{path}:{{method}}", Calls(google, rooms)))
    routes: list[BaseRoute] = [Route("/v1/traces", spans, methods=["POST"])]
    for method, path, endpoint in served:
        routes.append(Route(path, endpoint, methods=[method]))
        routes.append(Route("/rollouts/{rollout}" + path, endpoint, methods=[method]))
    return routes


def _shape(path: str, error: ApiError) -> bytes:
    """The body of an error that comes up before a path has found its endpoint."""
    return _dialect_at(path).error(error)


def _dialect_at(path: str) -> Dialect:
    if "/v1beta/" in path or ("/v1/models/" in path and ":" in path):
        return gemini.Gemini()
    return messages.Messages() if "/v1/messages" in path else Chat()


def _health(gate: Gate) -> Route:
    async def healthz(_: Request) -> Response:
        body = orjson.dumps({"status": "ok", "version": gate.version})
        return Response(body, media_type="application/json")

    return Route("/healthz", healthz)

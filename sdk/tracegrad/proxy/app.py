"""The proxy as an ASGI application, put together from its parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import orjson
from fastapi import FastAPI
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tracegrad.chat.model import ChatFormat
from tracegrad.chat.token_pieces import token_pieces
from tracegrad.events import Json
from tracegrad.host_memory import keep_returning_memory
from tracegrad.protocol import TRACES_PATH
from tracegrad.proxy.auth.feedback_origins import FeedbackOrigins
from tracegrad.proxy.auth.middleware import Authenticator, AuthMiddleware, Caller
from tracegrad.proxy.auth.origin_check import OriginCheck
from tracegrad.proxy.auth.rollout_attribution import MOST_TRACES, TraceIndex
from tracegrad.proxy.auth.rollout_keys import RolloutKeyService
from tracegrad.proxy.capture.call_index import MOST_REMEMBERED
from tracegrad.proxy.capture.recorder import EventWriter, Recorder
from tracegrad.proxy.capture.redaction import Redactor, load_hooks
from tracegrad.proxy.capture.retry_cache import ANSWERED_BYTES, MOST_BYTES, RetryCache
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.dialects.anthropic import request as messages
from tracegrad.proxy.dialects.base import Dialect
from tracegrad.proxy.dialects.gemini import request as gemini
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.dialects.openai_completions import OpenAICompletionsDialect
from tracegrad.proxy.dialects.openai_responses.request import OpenAIResponsesDialect
from tracegrad.proxy.endpoints.anchors import make_anchors_router
from tracegrad.proxy.endpoints.control_api import (
    OwnGate,
    WeightPushes,
    add_error_handlers,
    make_control_router,
    make_keys_router,
)
from tracegrad.proxy.endpoints.count_tokens import CountTokensEndpoint
from tracegrad.proxy.endpoints.feedback import make_feedback_router
from tracegrad.proxy.endpoints.intake import make_intake_router
from tracegrad.proxy.endpoints.llm_call import LlmCallEndpoint, ProxyServices
from tracegrad.proxy.endpoints.metrics import GaugeSampler, metrics_route
from tracegrad.proxy.endpoints.models import gemini_models_response, models_response
from tracegrad.proxy.endpoints.openapi import extend_openapi
from tracegrad.proxy.endpoints.passthrough import PassthroughEndpoint, ShapeResponse
from tracegrad.proxy.endpoints.tasks import make_tasks_router
from tracegrad.proxy.engine.intake_gate import MOST_BEGUN, IntakeGate
from tracegrad.proxy.engine.reasoning_effort import ReasoningEfforts
from tracegrad.proxy.engine.request_rules import RequestRules
from tracegrad.proxy.engine.upstreams import QueueLimits, Upstream, UpstreamPool, UpstreamTimeouts
from tracegrad.proxy.engine.upstreams.pushed_weights import PushedWeights
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate
from tracegrad.proxy.http.errors import ApiError
from tracegrad.proxy.http.request_body import BodyReader, RequestSizeLimits, WorkerThreads
from tracegrad.proxy.metrics.counters import MetricCells, ProxyMetrics
from tracegrad.proxy.metrics.proxy_state import proxy_state
from tracegrad.proxy.otel.ingest import SpanIngest
from tracegrad.proxy.otel.receiver import ExportLimits, OtlpReceiver
from tracegrad.proxy.prompt_reuse.renderer_loader import EngineRenderer
from tracegrad.proxy.prompt_reuse.resolver import PromptReuse
from tracegrad.proxy.shared_counts import SharedCount
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.proxy.store_async import RECONNECT_S
from tracegrad.proxy.store_writer.frames import Opening
from tracegrad.store import Store
from tracegrad.store.anchors.anchor_store import AnchorStore
from tracegrad.store.ledger.intake import Intake
from tracegrad.store.write.parent_cache import MAX_TURNS
from tracegrad.ui.app import make_ui, ui_routes
from tracegrad.ui.pages.tokens import ReadTokens
from tracegrad.ui.proxy_state import ProxyState
from tracegrad.ui.security import BASE as PAGE_PATH
from tracegrad.urls import masked

# Seconds of silence after which a stream says something. Clients give up after 120 or more
# (Qwen Code 120, most others 300); proxies on the way often after 60.
KEEPALIVE_S = 15.0
# What is remembered for each MiB of `cache_mib`.
_CALLS_A_MIB, _ROLLOUTS_A_MIB = 500, 200


@dataclass(frozen=True, slots=True)
class WorkerLinks:
    """What a worker has in common with the others of its proxy.

    `in_flight` counts the calls at each upstream server, `metrics` what this worker does. `health`
    is the state of all of them.
    """

    log: SharedLog
    in_flight: Sequence[SharedCount]
    gate: WeightUpdateGate
    pushes: WeightPushes
    metrics: ProxyMetrics
    health: Callable[[], Awaitable[Json]]


class ModelName(PathConvertor):
    """May hold slashes; what follows a colon is a method of Google's."""

    regex = "[^:]+"


register_url_convertor("model_name", ModelName())


def create_app(
    settings: ProxySettings,
    *,
    store: Store,
    writer: EventWriter,
    patience_s: float | None = None,
    links: WorkerLinks | None = None,
    upstream: Upstream | None = None,
) -> FastAPI:
    """`store` is read, `writer` writes to it; both stay open, and are the caller's to close.
    `patience_s`: how long a call waits for what it writes (`store_async.STORE_TIMEOUT_S`).
    `links`: those of a worker among others; without, this process is the whole proxy. `upstream`:
    an engine of this process; None: the one that the settings name."""
    others = links.log if links is not None else None
    gate = links.gate if links is not None else _own_gate(settings, store)
    upstream = upstream or _upstream(settings, gate, links)
    metrics = links.metrics if links is not None else ProxyMetrics(metric_cells(settings))
    # Whoever gives little to the cache has little for what else is kept of calls and rollouts.
    remembered = min(MOST_REMEMBERED, _CALLS_A_MIB * settings.cache_mib)
    rollouts = min(MOST_REMEMBERED, _ROLLOUTS_A_MIB * settings.cache_mib)
    store.remember_turns(_remembered_turns(settings))
    traces = TraceIndex(min(MOST_TRACES, rollouts), others)
    exact = upstream.capabilities.exact_prompts
    renderer = EngineRenderer(
        settings.tokenizer,
        upstream.models,
        chat_template=settings.chat_template,
        kwargs=settings.chat_template_kwargs,
    )
    text = renderer if exact else None
    continuation = PromptReuse(
        store, limit_bytes=settings.cache_mib << 20, text=text, others=others
    )
    redactor = Redactor(load_hooks(settings.redact), keep_text=settings.keep_text)
    recorder = Recorder(
        writer,
        store,
        continuation,
        traces,
        redactor,
        patience_s=patience_s,
        others=others,
        metrics=metrics,
        remembered=remembered,
        rollouts=rollouts,
    )
    admin = settings.admin_key
    control, scraping = settings.control_key, settings.metrics_key
    access = Authenticator(
        admin.get_secret_value() if admin else None,
        RolloutKeyService(store, others=others),
        OriginCheck(settings.allowed_hosts),
        control_key=control.get_secret_value() if control else None,
        metrics_key=scraping.get_secret_value() if scraping else None,
    )
    workers = WorkerThreads()
    limits = RequestSizeLimits.of(settings)
    bodies = BodyReader(limits, workers)
    intake = Intake(store)
    paced = _intake_gate(settings, intake, metrics, min(MOST_BEGUN, rollouts))
    metrics.samplers.append(GaugeSampler(metrics, gate, upstream, bodies, paced))
    services = ProxyServices(
        upstream=upstream,
        gate=gate,
        intake=paced,
        recorder=recorder,
        prompt_reuse=continuation,
        trace_index=traces,
        retry_cache=RetryCache(others, most_bytes=min(MOST_BYTES, ANSWERED_BYTES * remembered)),
        model=settings.model,
        force_on_policy=settings.sampling == "free" and upstream.capabilities.tokens,
        engine_grammar=settings.engine_grammar,
        efforts=ReasoningEfforts(),
        routed_experts=settings.routed_experts,
        workers=workers,
        rules=RequestRules.of(settings),
        keepalive_s=KEEPALIVE_S,
        metrics=metrics,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        upstream.open()
        returning = asyncio.create_task(keep_returning_memory())
        yield
        returning.cancel()
        await upstream.close()
        workers.close()

    app = FastAPI(
        title="tracegrad proxy",
        description="LLM calls, spans and rewards of agents, recorded for training.",
        lifespan=lifespan,
    )
    add_error_handlers(app, _error_body)
    # First in line, before FastAPI's own routes: most requests are theirs.
    ingest = SpanIngest(recorder, continuation, traces, store, others)
    spans = OtlpReceiver(
        ingest, ExportLimits(limits.body, limits.values, settings.max_spans), workers
    )
    app.router.routes[:0] = _hot_routes(services, spans)
    health = links.health if links else partial(_state, gate, writer)
    app.router.routes.append(_health(health))
    app.router.routes.append(metrics_route(metrics))
    pushes = links.pushes if links is not None else OwnGate(gate)
    app.include_router(make_control_router(recorder, pushes, store, settings.upstreams))
    app.include_router(make_intake_router(intake, metrics))
    app.include_router(make_tasks_router(store))
    app.include_router(make_feedback_router(recorder, store))
    app.include_router(make_keys_router(access))
    anchors = AnchorStore(store, settings.anchors) if settings.anchors is not None else None
    app.include_router(make_anchors_router(anchors, redactor))
    app.router.routes.append(Route("/", _home, include_in_schema=False))
    page = make_ui(
        store,
        sessions=access.sessions,
        find_tokens=partial(_read_tokens, text),
        find_state=partial(_find_state, metrics, health),
    )
    app.router.routes += ui_routes(page)
    extend_openapi(app)
    app.add_middleware(AuthMiddleware, access=access, bodies=bodies, shape=_error_body)
    if settings.feedback_origins:
        app.add_middleware(FeedbackOrigins, origins=settings.feedback_origins)
    if others is not None:
        app.add_middleware(CatchUp, others=others)
    return app


def writer_opening(settings: ProxySettings, *, worker: int | None = None) -> Opening:
    """What the process that writes for this proxy has to know, or for one `worker` of it."""
    return Opening(
        url=settings.store.get_secret_value(),
        log_format=settings.log_format,
        remembered=_remembered_turns(settings),
        reconnect_s=RECONNECT_S,
        worker=worker,
    )


def _remembered_turns(settings: ProxySettings) -> int:
    return min(MAX_TURNS, _ROLLOUTS_A_MIB * settings.cache_mib)


def metric_cells(settings: ProxySettings) -> MetricCells:
    """For all workers of the proxy."""
    servers = settings.upstreams if settings.upstream_kind != "litellm" else ()
    return MetricCells(settings.workers, list(map(masked, servers)))


class CatchUp:
    """ASGI middleware: before a request is looked at, its worker learns what others did."""

    def __init__(self, app: ASGIApp, others: SharedLog) -> None:
        self._app = app
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._others.catch_up()
        await self._app(scope, receive, send)


def _own_gate(settings: ProxySettings, store: Store) -> WeightUpdateGate:
    return WeightUpdateGate(
        version=store.current_version() or 0,
        held=settings.held,
        lacks_version=settings.held,
        max_waiting=settings.max_waiting,
        max_wait_s=settings.max_wait_s,
    )


def _intake_gate(
    settings: ProxySettings, intake: Intake, metrics: ProxyMetrics, remembered: int
) -> IntakeGate | None:
    if not settings.pace_calls:
        return None
    return IntakeGate(
        intake,
        metrics,
        max_waiting=settings.max_waiting,
        max_wait_s=settings.max_wait_s,
        remembered=remembered,
    )


def _upstream(
    settings: ProxySettings, gate: WeightUpdateGate, links: WorkerLinks | None
) -> Upstream:
    key = settings.upstream_api_key
    api_key = key.get_secret_value() if key else None
    timeouts = UpstreamTimeouts(read_s=settings.read_timeout_s)
    if settings.upstream_kind == "litellm":
        # An extra of its own, and slow to import.
        from tracegrad.proxy.engine.upstreams.litellm import LiteLLMUpstream

        base = settings.upstream if "upstream" in settings.model_fields_set else None
        return LiteLLMUpstream(
            model=settings.model, api_base=base, api_key=api_key, timeouts=timeouts
        )

    pushed = PushedWeights(gate)
    pool = UpstreamPool(
        settings.upstreams,
        kind=settings.upstream_kind,
        api_key=api_key,
        timeouts=timeouts,
        queue=QueueLimits(settings.max_waiting, settings.max_wait_s),
        admit=pushed.are_current,
        restarted=pushed.were_replaced,
        others=links.log if links is not None else None,
        calls=links.in_flight if links is not None else (),
        is_held=gate.holds,
        canary=lambda: gate.canary,
    )
    gate.on_release = pool.release_held
    return pool


def _hot_routes(services: ProxyServices, spans: ASGIApp) -> list[BaseRoute]:
    def models_as(shape: ShapeResponse) -> ASGIApp:
        return PassthroughEndpoint(services.upstream, "GET", "/v1/models", shape=shape)

    async def to_embed(raw: bytes, caller: Caller) -> bytes:
        run, rules = services.workers.run, services.rules
        return await run(len(raw), rules.embeddings, raw, admin=caller.admin)

    embeddings = PassthroughEndpoint(services.upstream, "POST", "/v1/embeddings", read=to_embed)

    claude, google = messages.AnthropicDialect(), gemini.GeminiDialect()
    count = CountTokensEndpoint(
        claude, services, parse=messages.count_request, shape=messages.count_answer
    )
    count_google = CountTokensEndpoint(
        google, services, parse=gemini.count_request, shape=gemini.count_answer
    )
    served: list[tuple[str, str, ASGIApp]] = [
        ("POST", "/v1/chat/completions", LlmCallEndpoint(OpenAIChatDialect(), services)),
        ("POST", "/v1/messages", LlmCallEndpoint(claude, services)),
        ("POST", "/v1/responses", LlmCallEndpoint(OpenAIResponsesDialect(), services)),
        ("POST", "/v1/completions", LlmCallEndpoint(OpenAICompletionsDialect(), services)),
        ("POST", "/v1/messages/count_tokens", count),
        ("POST", "/v1/embeddings", embeddings),
        ("GET", "/v1/models", models_as(models_response)),
        ("GET", "/v1/models/{model:model_name}", models_as(models_response)),
        ("GET", "/v1beta/models", models_as(gemini_models_response)),
    ]
    for version in ("v1beta", "v1"):  # Gemini CLI's, and that of google-genai 3
        path = f"/{version}/models/{{model:path}}"
        served.append(("POST", f"{path}:countTokens", count_google))
        served.append(("POST", f"{path}:{{method}}", LlmCallEndpoint(google, services)))
    routes: list[BaseRoute] = [Route(TRACES_PATH, spans, methods=["POST"])]
    for method, path, endpoint in served:
        routes.append(Route(path, endpoint, methods=[method]))
        routes.append(Route("/rollouts/{rollout}" + path, endpoint, methods=[method]))
    return routes


def _error_body(path: str, error: ApiError) -> bytes:
    """The body of an error that comes up before a path has found its endpoint."""
    return _dialect_at(path).error(error)


def _dialect_at(path: str) -> Dialect:
    if "/v1beta/" in path or ("/v1/models/" in path and ":" in path):
        return gemini.GeminiDialect()
    return messages.AnthropicDialect() if "/v1/messages" in path else OpenAIChatDialect()


async def _state(gate: WeightUpdateGate, writer: EventWriter) -> Json:
    return {"status": "ok", "version": gate.version, "writer": writer.load()._asdict()}


async def _read_tokens(text: EngineRenderer | None) -> ReadTokens | None:
    """How the page reads tokens: with the tokenizer that prompts are continued by."""
    found = await text.get() if text is not None else None
    return partial(token_pieces, found.tokenizer) if isinstance(found, ChatFormat) else None


async def _find_state(metrics: ProxyMetrics, health: Callable[[], Awaitable[Json]]) -> ProxyState:
    """What the page shows of the proxy."""
    return proxy_state(metrics, await health(), os.getpid())


async def _home(_: Request) -> Response:
    return RedirectResponse(PAGE_PATH, 303)


def _health(state: Callable[[], Awaitable[Json]]) -> Route:
    async def healthz(_: Request) -> Response:
        return Response(orjson.dumps(await state()), media_type="application/json")

    return Route("/healthz", healthz)

"""The engine's own routes are not to be had through the proxy, however they are spelled.

vLLM in development mode, which weight pushes need, answers anybody who reaches these: it would
pause, load other weights, or run a function of the caller's on every worker.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from support.proxy.raw_http import Reader, bounded, connect
from support.proxy.servers import serving
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.store import GroupCommitWriter, Store

# What an agent may have of the engine, through the proxy's routes of the same names.
SERVED = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/embeddings",
}
# Every other route of vLLM 0.32.0's server.
_CONTROL = """
    /abort_requests /classify /cohere/v2/chat /cohere/v2/chat/render /collective_rpc /detokenize
    /docs /fault_tolerance/apply /fault_tolerance/status /finish_weight_update
    /generative_scoring /get_world_size /health /inference/v1/abort_requests
    /inference/v1/generate /init_weight_transfer_engine /invocations /is_paused
    /is_scaling_elastic_ep /is_sleeping /kv_event_sources /load /metrics /pause /ping /pooling
    /ready /readyz /release_kv_cache_memory /rerank /reset_encoder_cache /reset_mm_cache
    /reset_prefix_cache /resume /scale_elastic_ep /score /server_info
    /shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_profile
    /start_weight_update /static /stop_profile /tokenize /tokenizer_info /update_weight_version
    /update_weights /v1/audio/transcriptions /v1/audio/translations /v1/chat/completions/batch
    /v1/chat/completions/derender /v1/chat/completions/render /v1/completions/derender
    /v1/completions/render /v1/load_lora_adapter /v1/messages/render /v1/realtime /v1/rerank
    /v1/responses/render /v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/score
    /v1/systemone /v1/unload_lora_adapter /v2/embed /v2/rerank /version /wake_up /weight_checker
    /weight_info
"""
CONTROL = _CONTROL.split()

# `{}` is the control route with its slash, `{bare}` without.
SPELLINGS = [
    "{}",
    "{}/",
    "/{}",
    "///{}",
    "/.{}",
    "/%2e{}",
    "/v1{}",
    "/v1/{}",
    "/v1/..{}",
    "/v1/%2e%2e{}",
    "/v1/..%2f{bare}",
    "/v1%2f..{}",
    "/v1/models/..{}",
    "/v1/models{}",
    "/v1/models/..%2f..%2f{bare}",
    "/v1/models;{bare}",
    "/v1/models?/..{}",
    "/v1/models%3f/..{}",
    "/v1/models%00{}",
    "/v1/models%0d%0a{}",
    "/v1/chat/completions/../../..{}",
    "/v1/chat/completions{}",
    "/v1/embeddings/..%5c..%5c{bare}",
    "/v1beta{}",
    "/v1beta/models/..%2f..%2f..%2f{bare}:generateContent",
    "/v1beta/models/../..{}:generateContent",
    "/rollouts/x{}",
    "/rollouts/x/v1{}",
    "/rollouts/x/../..{}",
    "/rollouts/../..{}",
    "/rollouts/..%2f..%2f{bare}/v1/models",
    "/rollouts/x%2fv1%2f..%2f..%2f..%2f{bare}",
    "/api{}",
    "/api/..{}",
    "/ui/..{}",
    "/healthz{}",
    "/healthz/..{}",
    "http://127.0.0.1:8000{}",
    "http://engine/v1/..{}",
    "\\{bare}",
]
OTHER_METHODS = ["PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "PROPFIND"]


class Engine:
    """Answers every path, and remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.asked.append((scope["method"], scope["raw_path"].decode("latin-1")))
            await JSONResponse({"object": "list", "data": []})(scope, receive, send)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def served(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A proxy without an admin key: nothing but its routes keeps anybody out."""
    url = f"sqlite:///{tmp_path_factory.mktemp('control')}/store.db"
    with (
        Store.open(url) as store,
        GroupCommitWriter(store) as writer,
        serving(engine, lifespan="off") as engine_url,
        bounded(
            create_app(ProxySettings(upstream=engine_url), store=store, writer=writer),
            ConnectionLimits(),
        ) as front,
    ):
        yield front


@pytest.fixture
def front(served: str, engine: Engine) -> str:
    engine.asked.clear()
    return served


def ask(url: str, requests: list[bytes]) -> list[int]:
    """The statuses of the answers, over as few connections as the proxy allows."""
    statuses: list[int] = []
    while len(statuses) < len(requests):
        with connect(url) as client:
            reader = Reader(client)
            for request in requests[len(statuses) :]:
                client.sendall(request)
                answer = reader.answer(to_head=request.startswith(b"HEAD"))
                assert answer is not None, request
                statuses.append(answer.status)
                if answer.headers.get("connection") == "close":
                    break
    return statuses


def request(method: str, target: str, *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*lines, *headers, "content-length: 2", "", "{}"]).encode()


def test_what_is_served_does_reach_the_engine(front: str, engine: Engine) -> None:
    """So that the tests below would notice."""
    ask(front, [request("GET", "/v1/models"), request("POST", "/rollouts/x/v1/embeddings")])
    assert engine.asked == [("GET", "/v1/models"), ("POST", "/v1/embeddings")]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_control_route_is_reached(front: str, engine: Engine, spelling: str) -> None:
    targets = [spelling.format(route, bare=route[1:]) for route in CONTROL]
    requests = [request(method, target) for target in targets for method in ("POST", "GET")]
    statuses = ask(front, requests)
    assert {path for _, path in engine.asked} <= {"/v1/models", "/v1/embeddings"}
    assert all(status < 500 for status in statuses)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_no_other_method_reaches_one(front: str, engine: Engine, method: str) -> None:
    requests = [request(method, prefix + route) for route in CONTROL for prefix in ("", "/v1")]
    statuses = ask(front, requests)
    assert engine.asked == []
    assert all(status < 500 for status in statuses)


@pytest.mark.parametrize(
    "header",
    [
        "x-original-url: /pause",
        "x-rewrite-url: /pause",
        "x-forwarded-prefix: /pause",
        "x-forwarded-uri: /pause",
        "x-http-method-override: POST",
        "forwarded: host=engine;proto=http",
        "upgrade: websocket\r\nconnection: upgrade",
        "host: engine:8000",
    ],
)
def test_no_header_changes_the_way(front: str, engine: Engine, header: str) -> None:
    ask(front, [request("GET", "/v1/models", header)])
    assert engine.asked in ([("GET", "/v1/models")], [])


def test_a_query_stays_here(front: str, engine: Engine) -> None:
    ask(front, [request("GET", "/v1/models?url=/pause&key=sk-own")])
    assert engine.asked == [("GET", "/v1/models")]


def test_the_list_is_that_of_the_installed_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    routes = set()
    for path in (Path(found.origin).parent / "entrypoints").rglob("*.py"):
        routes |= routes_in(ast.parse(path.read_text()))
    assert "/pause" in routes
    assert routes - SERVED <= set(CONTROL)


def routes_in(tree: ast.AST) -> set[str]:
    """The paths in calls such as `@router.post("/pause")`."""
    methods = {"get", "post", "put", "patch", "delete", "api_route", "websocket", "mount"}
    methods |= {"add_api_route", "add_route", "Mount", "Route"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            path = node.args[0].value
            if name in methods and isinstance(path, str) and path.startswith("/"):
                found.add(path)
    return found

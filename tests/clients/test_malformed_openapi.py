"""The served OpenAPI document: what it describes, and requests made from it, right and wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import jsonschema_rs
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from starlette.routing import Match, Route

from support.proxy.full_bodies import FULL
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.raw_calls import READ
from support.proxy.servers import CONTROL
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.otel.otlp import PROTOBUF

PATIENCE_S = 60.0


def _app() -> FastAPI:
    """As it is served, but for a store: pytest has to know the operations before one is open."""
    return create_app(ProxySettings(), store=Mock(current_version=lambda: 0), writer=Mock())


DOCUMENT: dict[str, Any] = _app().openapi()


@schemathesis.serializer(PROTOBUF)
def as_bytes(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=SchemathesisConfig())
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# The long form has the others.
QUICK = re.compile(r"\w+ /(?!rollouts|v1/models/)")
OPERATIONS = [each.ok() for each in SCHEMA.get_all_operations() if QUICK.match(each.ok().label)]


def data_of(operation: Any) -> list[GenerationMode]:
    """Nothing can be wrong with a request that has nothing in it, or any bytes."""
    is_json = any(body.media_type == "application/json" for body in operation.body)
    has_data = is_json or operation.path_parameters or operation.query
    return list(GenerationMode) if has_data else [GenerationMode.POSITIVE]


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        pytest.param(operation, mode, id=f"{mode.value} {operation.label}")
        for operation in OPERATIONS
        for mode in data_of(operation)
    ],
)
def test_whatever_is_sent_is_answered_as_documented(
    patient: ProxyWithEngine, operation: Any, mode: GenerationMode
) -> None:
    """With schemathesis' strategies alone: its plugin gives all operations of a document one id
    in this pytest, and of tests with one id pytest-xdist runs one."""

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        pushes = "/push/" in case.path
        key = CONTROL if pushes else None
        response = case.call(base_url=patient.url, timeout=PATIENCE_S, headers=key)
        if pushes:  # or the next calls wait at the gate
            httpx.post(f"{patient.url}/api/push/release", headers=CONTROL)
        case.validate_response(
            response, checks=[getattr(schemathesis.checks, name) for name in CHECKS]
        )

    send()


@pytest.mark.slow
def test_much_more_of_whatever_is_answered_as_documented(
    patient: ProxyWithEngine, tmp_path: Path
) -> None:
    """schemathesis as people run it."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{patient.url}/openapi.json"]
    options = {
        "checks": ",".join(CHECKS),
        "phases": "coverage,fuzzing",
        "max-examples": "100",
        "seed": "1",
        "request-timeout": str(PATIENCE_S),
        "warnings": "off",
        # A gate that is held makes the calls of all others wait, as it should.
        "exclude-path": "/api/push/hold",
        # It cannot write protobuf; the test above sends what it made as bytes.
        "exclude-operation-id": "post_v1_traces",
    }
    told = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(
        [*command, *told, "--generation-deterministic"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    operations = sum(map(len, DOCUMENT["paths"].values()))
    assert f"Tested: {operations - 2}\n" in done.stdout


def test_the_document_is_the_one_that_is_served(patient: ProxyWithEngine) -> None:
    served = httpx.get(f"{patient.url}/openapi.json").json()
    assert served == DOCUMENT
    assert served == httpx.get(f"{patient.url}/openapi.json").json(), "and again"


def test_every_route_is_described() -> None:
    """A route that is not meant to be has `include_in_schema=False`."""
    routes = [
        route for route in _app().routes if isinstance(route, Route) and route.include_in_schema
    ]
    found: list[Route] = []
    for path, item in DOCUMENT["paths"].items():
        for method in item:
            where = re.sub(r"\{\w+\}", "x", path)
            scope = {"type": "http", "method": method.upper(), "path": where, "headers": []}
            serving = [route for route in routes if route.matches(scope)[0] is Match.FULL]
            assert serving, f"{method} {path} is described, but not served"
            found.append(serving[0])
    missing = [route.path for route in routes if route not in found]
    assert missing == []


def test_operations_have_names_of_their_own() -> None:
    ids = [each["operationId"] for item in DOCUMENT["paths"].values() for each in item.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere() -> None:
    text = repr(DOCUMENT)
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names == names & set(DOCUMENT["components"]["schemas"])
    assert "HTTPValidationError" not in text, "FastAPI's own; errors have another shape here"


def schema_of(path: str) -> dict[str, Any]:
    """The JSON schema of the bodies that the path takes, with all that it refers to."""
    where = path.replace("/mock:", "/{model}:")
    content = DOCUMENT["paths"][where]["post"]["requestBody"]["content"]
    return {**content["application/json"]["schema"], "components": DOCUMENT["components"]}


@pytest.mark.parametrize("call", READ, ids=str)
def test_what_the_document_allows_is_what_clients_send(call: Any) -> None:
    schema = jsonschema_rs.validator_for(schema_of(call.path))
    assert [error.message for error in schema.iter_errors(FULL[call.name])] == []
    assert schema.is_valid(call.body)
    for wrong in ({}, {**call.body, "messages": "x", "contents": "x", "input": 1, "prompt": {}}):
        if call.name != "responses" or wrong:  # a response may go on with nothing new to say
            assert not schema.is_valid(wrong) or call.name == "gemini count"

"""The served OpenAPI document: what it describes, and requests made from it, right and wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import jsonschema_rs
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Match, Route

from support.client_rig import Rig, rigged
from support.full_bodies import FULL
from support.neighbour import neighbour
from support.patient_engine import PatientEngine
from support.proxy_rig import EngineServer
from support.raw_calls import READ
from tracegrad.proxy import create_app
from tracegrad.proxy.collector import PROTOBUF
from tracegrad.proxy.openapi import described
from tracegrad.settings import ProxySettings

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def patient(engine_server: EngineServer, new_store: Callable[[], Path]) -> Iterator[Rig]:
    with (
        rigged(engine_server, PatientEngine(), new_store(), prepare=described) as rig,
        neighbour(rig),
    ):
        yield rig


def _app() -> FastAPI:
    """As it is served, but for a store: pytest has to know the operations before one is open."""
    app = create_app(ProxySettings(), store=Mock(current_version=lambda: 0), writer=Mock())
    described(app)
    return app


DOCUMENT: dict[str, Any] = _app().openapi()


@schemathesis.serializer(PROTOBUF)
def as_bytes(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def requests(*, coverage: bool, **chosen: str) -> Any:
    """schemathesis' own strategies of right and wrong requests, the same in every run."""
    config = SchemathesisConfig()
    config.projects.default.generation.update(deterministic=True, no_shrink=True)
    config.projects.default.phases.coverage.enabled = coverage
    return schemathesis.openapi.from_dict(DOCUMENT, config=config).include(**chosen)


def examples(number: int) -> settings:
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def answered_as_documented(case: Any, rig: Rig) -> None:
    response = case.call(base_url=rig.url, timeout=PATIENCE_S)
    if "/push/" in case.path:  # or the next calls wait at the gate
        httpx.post(f"{rig.url}/api/push/release")
    case.validate_response(
        response,
        checks=[
            schemathesis.checks.not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
    )


@examples(6)
@requests(coverage=False, path_regex="^/(?!rollouts|v1/models/)").parametrize()
def test_whatever_is_sent_is_answered_as_documented(case: Any, patient: Rig) -> None:
    answered_as_documented(case, patient)


@pytest.mark.slow
@examples(150)
@requests(coverage=True, path_regex=".").parametrize()
def test_much_more_of_whatever_is_answered_as_documented(case: Any, patient: Rig) -> None:
    answered_as_documented(case, patient)


def test_the_document_is_the_one_that_is_served(patient: Rig) -> None:
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

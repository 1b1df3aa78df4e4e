"""`tracegrad export --otlp`, against a server that takes notes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from typer.testing import CliRunner, Result

from support.transfer.template_store import fill
from tracegrad.cli.app import app
from tracegrad.events import Reward
from tracegrad.store import Store


@dataclass
class Notes:
    status: int = 200
    answer: bytes = b""
    paths: list[str] = field(default_factory=list)
    headers: list[Message] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Notes]:
    notes = Notes()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = gzip.decompress(self.rfile.read(int(self.headers["content-length"])))
            request = ExportTraceServiceRequest.FromString(body)
            notes.paths.append(self.path)
            notes.headers.append(self.headers)
            notes.names += [
                span.name
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
            self.send_response(notes.status)
            self.end_headers()
            self.wfile.write(notes.answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        notes.url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield notes
        listening.shutdown()
        thread.join()


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with Store.open(url) as store:
        fill(store)
    return url


def export(store_url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["export", "--store", store_url, *arguments])


def test_what_the_filters_choose_is_sent(server: Notes, store_url: str, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("Basic abc=\n")
    done = export(
        store_url,
        *("--otlp", server.url, "--task", "stock"),
        *("--header", "x-mlflow-experiment-id=0", "--header", f"authorization=@{secret}"),
    )
    assert done.exit_code == 0, done.output
    assert done.stderr == f"sent 1 rollout, 3 spans to {server.url}/v1/traces\n"
    assert server.names == ["invoke_agent shop", "chat m", "chat m"]
    assert server.paths == ["/v1/traces"]
    [headers] = server.headers
    assert headers["content-type"] == "application/x-protobuf"
    assert (headers["x-mlflow-experiment-id"], headers["authorization"]) == ("0", "Basic abc=")


def test_rewards_for_turns_that_are_not_there_are_counted(server: Notes, store_url: str) -> None:
    with Store.open(store_url) as store:
        store.append([Reward(rollout_id="c1", value=1.0, turn=turn) for turn in (1, -2, 2, -3)])
        store.append([Reward(rollout_id="c1", value=None, turn=2)])
    done = export(store_url, "--otlp", server.url, "--task", "stock")
    assert done.stderr.splitlines()[1:] == ["left out: no_such_turn (2 rewards)"]


def test_texts_may_be_left_out(server: Notes, store_url: str) -> None:
    assert export(store_url, "--otlp", f"{server.url}/otel/v1/traces", "--no-text").exit_code == 0
    assert set(server.paths) == {"/otel/v1/traces"}


def test_what_is_refused_there_is_said(server: Notes, store_url: str) -> None:
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 1
    server.answer = answer.SerializeToString()
    done = export(store_url, "--otlp", server.url, "--task", "stock")
    assert done.stderr.splitlines()[1] == "refused there: 1 span"


def test_a_server_that_refuses_is_one_line(server: Notes, store_url: str) -> None:
    server.status, server.answer = 401, b"who\nare you"
    done = export(store_url, "--otlp", server.url)
    assert done.exit_code == 1
    assert done.stderr == (
        f"tracegrad: {server.url}/v1/traces: 401 Unauthorized: who are you (sent before it:"
        " 0 spans)\n"
    )
    nobody = export(store_url, "--otlp", "http://127.0.0.1:1")
    assert nobody.exit_code == 1
    assert nobody.stderr.startswith("tracegrad: http://127.0.0.1:1/v1/traces: ")
    assert "refused" in nobody.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns"], "--rollouts, --turns, --layout, --otlp: choose one"),
        (["-o", "spans.jsonl"], "--otlp sends; leave -o and --format out"),
        (["--header", "key"], "'key'; write NAME=VALUE"),
        (["--header", "key=@/no/such"], "/no/such: No such file or directory"),
    ],
)
def test_arguments_that_do_not_go_together(
    store_url: str, arguments: list[str], message: str
) -> None:
    done = export(store_url, "--otlp", "http://127.0.0.1:1", *arguments)
    assert done.exit_code != 0
    assert message in done.stderr


def test_headers_need_a_server(store_url: str) -> None:
    done = export(store_url, "--header", "a=b")
    assert done.exit_code == 1
    assert done.stderr == "tracegrad: --header goes with --otlp\n"

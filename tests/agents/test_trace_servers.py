"""Servers that show traces, in a Python of their own: what we send is what their clients read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support import trace_servers
from support.cli_agents.recipes import CACHE
from support.proxy.servers import eventually
from support.transfer.template_store import fill
from tracegrad.cli.app import app
from tracegrad.events import Span
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe
from tracegrad.store import Store

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPTS = Path(trace_servers.__file__).parent


@dataclass(frozen=True)
class TraceServer:
    recipe: Recipe
    command: Sequence[str]  # {port}, {folder}
    health: str
    headers: Sequence[str] = ()

    def folder(self) -> Path:
        return install_agent(self.recipe, CACHE).folder / "bin"


def recipe(name: str, package: str) -> Recipe:
    return Recipe(
        name=name,
        version=package.partition("==")[2],
        dialect="chat",
        installer="pip",
        lock=SCRIPTS / f"{name}.txt",
        packages=(package,),
        command=(name,),
    )


SERVERS = [
    TraceServer(recipe("phoenix", "arize-phoenix==20.26.1"), ["phoenix", "serve"], "/healthz"),
    TraceServer(
        recipe("mlflow", "mlflow==3.17.2"),
        [
            *("mlflow", "server", "--host", "127.0.0.1", "--port", "{port}", "--workers", "1"),
            *("--backend-store-uri", "sqlite:///{folder}/mlflow.db"),
            *("--default-artifact-root", "{folder}/artifacts"),
        ],
        "/health",
        ["--header", "x-mlflow-experiment-id=0"],
    ),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def running(server: TraceServer, folder: Path) -> Iterator[str]:
    """Its address."""
    port, binaries = free_port(), server.folder()
    name, *arguments = [part.format(port=port, folder=folder) for part in server.command]
    environ = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    log = folder / "log"
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("w") as out,
        subprocess.Popen(
            [binaries / name, *arguments], stdout=out, stderr=out, env=environ, cwd=folder
        ) as process,
    ):
        try:
            eventually(lambda: process.poll() is not None or answers(url + server.health), 180)
            assert process.poll() is None, log.read_text()
            yield url
        finally:
            process.terminate()


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url) as answer:
        return bool(answer.status == 200)
    return False


def read_back(server: TraceServer, url: str, folder: Path) -> list[dict[str, Any]]:
    script = SCRIPTS / f"read_{server.recipe.name}.py"
    done = subprocess.run(
        [server.folder() / "python", script, url],
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.recipe.name)
def test_stored_rollouts_are_shown(server: TraceServer, tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path / 'store.db'}"
    with Store.open(store_url) as store:
        fill(store)
        tool = Span(
            trace_id="ab" * 16,
            span_id="cd" * 8,
            rollout_id="c1",
            name="stock",
            start_ns=10**18,
            end_ns=10**18 + 5,
            attributes={"item": {"a": 1}},
        )
        store.append([tool])
    command = ["export", "--store", store_url, "--otlp"]
    with running(server, tmp_path) as url:
        for _ in range(2):  # twice is as once
            done = CliRunner().invoke(app, [*command, url, *server.headers])
            assert done.exit_code == 0, done.output
            assert done.stderr == f"sent 10 rollouts, 24 spans to {url}/v1/traces\n"
        spans: list[dict[str, Any]] = []

        def all_there() -> bool:
            spans[:] = read_back(server, url, tmp_path)
            return len(spans) >= 24

        eventually(all_there, 60)
    assert len(spans) == 24
    traces = {span["trace"] for span in spans}
    assert len(traces) == 10
    roots = {span["id"]: span for span in spans if span["parent"] is None}
    assert {span["name"] for span in roots.values()} == {"invoke_agent shop"}
    assert {span["kind"] for span in roots.values()} == {"AGENT"}
    calls = [span for span in spans if span["kind"] == "LLM"]
    assert len(calls) == 13
    assert {span["name"] for span in calls} == {"chat m"}
    for call in calls:
        assert roots[call["parent"]]["trace"] == call["trace"]
    [sent] = [span for span in spans if span["name"] == "stock"]
    shop = [span for span in spans if span["trace"] == sent["trace"] and span is not sent]
    assert sent["parent"] in {span["id"] for span in shop if span["parent"] is None}
    assert {span["said"] for span in shop if span["kind"] == "LLM"} == {None, "17 lamps"}
    [lamps] = [span for span in shop if span["said"] == "17 lamps" and span["kind"] == "LLM"]
    assert lamps["asked"] == "How many lamps?"
    with Store.open(store_url) as store:
        turn = store.rollout_turns("c1")[1]
    assert lamps["tokens"] == [len(turn.prompt_token_ids), len(turn.completion_token_ids)]
    assert sum(span["events"] == ["gen_ai.evaluation.result"] for span in roots.values()) == 8

"""OpenEnv's own servers, in a Python of their own: episodes over their WebSocket are rollouts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support import environments
from support.cli_agents.recipes import CACHE
from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.runner_proxy import runner_proxy
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(environments.__file__).parent
OPENENV = Recipe(
    name="openenv",
    version="0.3.0",
    dialect="chat",
    installer="pip",
    lock=SCRIPTS / "openenv.txt",
    packages=("openenv-core==0.3.0",),
    command=("python",),
)


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    with runner_proxy(tmp_path, monkeypatch) as found:
        yield found


def python() -> Path:
    return install_agent(OPENENV, CACHE).folder / "bin" / "python"


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


@contextmanager
def servers(ports: Sequence[int], log: Path) -> Iterator[None]:
    command = [python(), SCRIPTS / "openenv_server.py", *map(str, ports)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            for port in ports:
                eventually(lambda port=port: process.poll() is not None or is_healthy(port), 120)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.kill()


def is_healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        return bool(answer.status == 200)
    return False


def test_episodes_of_its_servers_are_rollouts(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    says = ['{"number": 7}', '{"number": 3}', '{"number": 1}', '{"number": 1}']
    says += ['{"number": 13}', '{"text": "three"}']
    proxy.engine.replies.extend(Answer(reply) for reply in says)
    calls = [("add", '{"a": 1, "b": 2}'), ("add", '{"a": "one"}')]
    proxy.engine.replies.extend(Answer("", tool_calls=[call]) for call in calls)
    *ports, nobody = free_ports(3)
    with servers(ports, tmp_path / "servers.log"):
        done = subprocess.run(
            [
                *(python(), SCRIPTS / "play_openenv.py"),
                *(f"http://127.0.0.1:{port}" for port in (*ports, nobody)),
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "sdk", ROOT / "integrations"))),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step_count"] == 1
    rows = eventually(
        lambda: (
            len(found := [row for row in proxy.store.rollouts(limit=None) if row.outcome]) == 7
            and {str(row.task_id): row for row in found}
        ),
        60,
    )
    assert {name: (str(row.outcome), row.reward, row.turns) for name, row in rows.items()} == {
        "guess": ("completed", 0.5, 2),
        "wrong": ("completed", 0.0, 2),
        "falls": ("env_error", None, 1),
        "text": ("agent_error", 0.0, 1),
        "add": ("completed", 1.0, 1),
        "no-tool": ("completed", 0.0, 1),
        "nobody": ("infra_error", None, 0),
    }
    assert "the board fell off the table" in rows["falls"].error
    asked = next(each for each in proxy.engine.requests if each.get("tools"))
    [tool] = asked["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("add", "The sum.")
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    source = os.pathsep.join(map(str, (ROOT / "sdk", ROOT / "integrations")))
    done = subprocess.run(
        [sys.executable, "-c", "import tracegrad_integrations.environments.openenv_client"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "openenv is not installed: pip install 'tracegrad[openenv]'" in done.stderr

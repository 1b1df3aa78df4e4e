"""An environment of verifiers', in a Python of its own: its harness is the agent, its rewards are
the rollout's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tracegrad
from support import environments
from support.cli_agents.recipes import CACHE
from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.runner_proxy import runner_proxy
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.sandbox import BrokenEnvironment
from tracegrad_integrations.environments.verifiers_process import VerifiersEnvironment

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

FOLDER = Path(environments.__file__).parent
VERIFIERS = Recipe(
    name="verifiers",
    version="0.4.0",
    dialect="chat",
    installer="pip",
    lock=FOLDER / "verifiers.txt",
    packages=("verifiers==0.4.0", "uv"),
    command=("python",),
)
SETTINGS = {
    "taskset": {"id": "adding_taskset"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    with runner_proxy(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def python() -> Path:
    return install_agent(VERIFIERS, CACHE).folder / "bin" / "python"


def test_its_episodes_are_rollouts(proxy: ProxyWithEngine, python: Path) -> None:
    says = ("3", "It is 3.", "3", "3")
    proxy.engine.replies.extend(Answer(reply) for reply in says)
    options: Any = {"concurrency": 1, "retries": 0, "name": "adding", "said": lambda _: None}
    with VerifiersEnvironment(SETTINGS, python=python, folder=FOLDER) as environment:
        assert [task["id"] for task in environment.tasks] == ["right", "long", "broken", "killed"]
        again = {**environment.tasks[0], "id": "after"}  # its process is gone by then
        tracegrad.run(environment.play, train=[*environment.tasks, again], **options)
    rows = eventually(
        lambda: (
            len(found := [row for row in proxy.store.rollouts(limit=None) if row.outcome]) == 5
            and {str(row.task_id): row for row in found}
        ),
        60,
    )
    assert {name: (str(row.outcome), row.reward, row.turns) for name, row in rows.items()} == {
        "right": ("completed", 1.5, 1),
        "long": ("completed", 1.0, 1),
        "broken": ("env_error", None, 1),
        "killed": ("infra_error", None, 1),
        "after": ("infra_error", None, 0),
    }
    assert {row.agent for row in rows.values()} == {"adding"}
    assert "no scores today" in rows["broken"].error
    assert "exit code -9" in rows["killed"].error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"taskset": {"id": "no-such-taskset"}}, "taskset 'no-such-taskset' not found"),
        ({"taskset": {"id": "adding_taskset"}, "agents": 3}, "its process ended with exit code 1"),
    ],
)
def test_settings_that_are_none_are_said(python: Path, settings: dict[str, Any], said: str) -> None:
    with (
        pytest.raises(BrokenEnvironment, match=said),
        VerifiersEnvironment(settings, python=python, folder=FOLDER),
    ):
        pass


def test_a_python_that_is_none_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(BrokenEnvironment, match="nowhere: No such file"),
        VerifiersEnvironment(SETTINGS, python=tmp_path / "nowhere"),
    ):
        pass

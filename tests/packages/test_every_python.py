"""The wheel on every Python that it is made for: commands, and a rollout through its own proxy.

`make test-packages`. A version of which this machine has no interpreter is skipped, and counted.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest

import tracegrad
from support.engines.mock_engine import Answer, MockEngine
from support.packages import clean_venv, pythons, wheel
from support.packages.programs import TRACED_CALL
from support.packages.wheel import Distributions
from support.proxy.servers import serving

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return wheel.build(tmp_path_factory.mktemp("dist"))


@pytest.mark.parametrize("version", pythons.SUPPORTED)
def test_a_rollout_through_the_wheels_own_proxy(
    version: str, built: Distributions, tmp_path: Path
) -> None:
    python = pythons.find(version)
    if python is None:
        pytest.skip(f"no Python {version} here: put one on PATH, or its path in {pythons.VARIABLE}")
    venv = clean_venv.make(python, tmp_path / "venv", f"{built.wheel}[proxy]")
    assert venv.run("python", "-V").stdout.startswith(f"Python {version}.")
    for words in (("tracegrad", "--help"), ("tracegrad", "rollouts", "ls", "--help")):
        helped = venv.run(*words)
        assert (helped.returncode, helped.stderr) == (0, "")
        assert "Usage: tracegrad" in helped.stdout
    assert venv.run("tracegrad", "--version").stdout == f"tracegrad {tracegrad.__version__}\n"
    engine = MockEngine(replies=deque([Answer("four")]))
    with serving(engine.app()) as upstream, venv.proxy(upstream) as url:
        done = venv.run("python", "-c", TRACED_CALL, TRACEGRAD_URL=url)
        assert (done.stdout, done.returncode) == ("four\n", 0), done.stderr
    listed = venv.run("tracegrad", "rollouts", "ls", "--json", f"--store={venv.store}")
    (rollout,) = json.loads(listed.stdout)
    assert (rollout["task_id"], rollout["outcome"]) == ("sum", "completed")
    assert (rollout["turns"], rollout["reward"]) == (1, 1.0)

"""`make multi-agent`, `make sql-agent` and `make cli-agent` in short forms: agents in LangGraph,
and one that is a command in Docker containers, get better at held-out tasks while they work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from examples.cli_agent.__main__ import SHORT
from examples.cli_agent.run import SAMPLES

from support.cli_agents.recipes import CACHE
from support.system import docker_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine() -> Iterator[docker_engine.Engine]:
    if reason := docker_engine.why_not():
        pytest.skip(reason)
    with docker_engine.running() as engine:
        yield engine


def play(folder: Path, *command: str, **environ: str) -> dict[str, Any]:
    """The line of JSON that it ends with; it has risen as it must."""
    log, last = folder / "log", folder / "last"
    with log.open("w") as said, last.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=out,
            stderr=said,
        )
        try:
            process.wait()
        finally:
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
                process.kill()
                process.wait()
    assert process.returncode == 0, last.read_text() + log.read_text()
    found: dict[str, Any] = json.loads(last.read_text().splitlines()[-1])
    return found


def test_one_of_two_agents_in_langgraph_learns_to_write_sql(tmp_path: Path) -> None:
    short = ("--steps=6", "--tasks=45", "--split=validation")
    found = play(tmp_path, "examples.multi_agent", *short)
    # Its exit code says that none of the reviewer's was trained.
    assert found["turns_trained"] == found["turns_trained_author"] > 0


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_and_then_from_its_own_rewards(tmp_path: Path) -> None:
    found = play(tmp_path, "examples.distillation", "--short")
    assert found["teacher"] > 0.6
    assert found["sft_losses"][-1] < found["sft_losses"][0]
    assert found["policy_versions"] >= 4


@pytest.mark.slow  # as the one before it, but for the selection
def test_an_agent_in_langgraph_learns_to_write_sql(tmp_path: Path) -> None:
    found = play(tmp_path, "examples.sql_agent", "--short")
    # What it does without chance: at first nothing is right.
    assert found["greedy_after"] >= found["greedy_before"] + 0.2
    assert found["policy_versions"] >= 6  # the trainer goes on while the exam is held


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """For XDG_CACHE_HOME: the agents that other tests install, too."""
    (tmp_path / "cache" / "tracegrad").mkdir(parents=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "tracegrad" / "agents").symlink_to(CACHE)
    return tmp_path / "cache"


@pytest.mark.agents
def test_a_command_in_containers_learns_file_tasks(
    tmp_path: Path, caches: Path, engine: docker_engine.Engine
) -> None:
    found = play(
        tmp_path,
        "examples.cli_agent",
        "--short",
        f"--image={engine.image(docker_engine.PYTHON_IMAGE)}",
        DOCKER_HOST=engine.url,
        XDG_CACHE_HOME=str(caches),
    )
    # That both exams were passed through, and that two steps were taken on what containers gave.
    assert found["policy_versions"] >= SHORT.steps
    assert found["turns_trained"] > 0
    attempts = 3 * SHORT.tasks + SHORT.steps * SHORT.groups * SAMPLES
    assert found["rollouts"] - found["not_scored"] >= attempts
    assert engine.client().containers(all=True) == []

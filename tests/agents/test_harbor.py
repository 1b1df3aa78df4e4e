"""Harbor's own agents and task format, driven by a rollout's address, in sandboxes of ours."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cli_agents.recipes import AGENTS, CACHE, TASK
from support.cli_agents.scene import proxy_process
from support.cli_agents.scripted_engine import ScriptedEngine
from support.harbor.python312 import harbor_python
from support.proxy.servers import serving
from tracegrad.store import Store
from tracegrad.transfer.import_rollouts import RolloutImport

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
# Where a machine has authorities of its own: layers of agents are installed from registries.
CERTIFICATES = ("NODE_EXTRA_CA_CERTS", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
CHECK = """\
#!/bin/bash
mkdir -p /logs/verifier
cd /logs/verifier
test "$(cat /app/hello.txt)" = hi && echo 1 > reward.txt || echo 0 > reward.txt
"""


def task_folder(folder: Path) -> Path:
    """As Harbor's own tasks are."""
    task = folder / "make-hello"
    for part in ("environment", "tests", "solution"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 120.0\n')
    (task / "instruction.md").write_text(TASK)
    (task / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /app\n")
    (task / "tests" / "test.sh").write_text(CHECK)
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\nprintf hi > /app/hello.txt\n")
    return task


def trial(agent: str, model: str, folder: Path, proxy: str, *options: str) -> dict[str, Any]:
    python = harbor_python()
    source = [ROOT / "sdk", ROOT / "integrations", ROOT / "tests"]
    done = subprocess.run(
        [
            *(python, ROOT / "tests" / "support" / "harbor" / "run_trials.py"),
            *options,
            *(agent, model, task_folder(folder), folder, CACHE),
        ],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(map(str, source)),
            "TRACEGRAD_URL": proxy,
            **{name: os.environ[name] for name in CERTIFICATES if name in os.environ},
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize(
    ("agent", "model"),
    [
        ("gemini-cli", "gemini/policy"),
        ("codex", "openai/policy"),
        ("claude-code", "anthropic/policy"),
    ],
)
def test_an_agent_of_harbors_does_a_task_and_its_verifier_scores_it(
    agent: str, model: str, tmp_path: Path
) -> None:
    ours = AGENTS[agent]
    # Its own mark may be a vendor's web search, which is off here.
    shell, _ = ours.script.steps[0].tool_calls[0]
    engine = ScriptedEngine(script=replace(ours.script, tool=shell))
    store = f"sqlite:///{tmp_path}/store.db"
    with (
        serving(engine.app(), lifespan="off") as upstream,
        proxy_process(upstream, store, tmp_path / "proxy.log") as proxy,
    ):
        told = trial(agent, model, tmp_path, proxy)
    assert told["outcome"] == "completed", told
    assert (told["reward"], told["sandboxes"]) == (1.0, 1)
    with Store.open(store, create=False) as opened:
        [row] = opened.rollouts(limit=None)
        turns = opened.rollout_turns(row.rollout_id)
    assert row.rollout_id == told["rollout"]
    assert (row.agent, row.outcome, row.reward) == (agent, "completed", 1.0)
    assert {turn.dialect for turn in turns} == {ours.recipe.dialect}
    assert len(turns) >= len(engine.script.steps)
    with Store.open(f"sqlite:///{tmp_path}/again.db") as again:
        importing = RolloutImport(again)
        importing.folder(tmp_path / "trials")
        [row] = again.rollouts()
    assert (row.task_id, row.reward) == ("make-hello", 1.0), "as its result says"


def test_trials_are_a_group_of_a_run(tmp_path: Path) -> None:
    """As of any function: at the trainer's pace, filled, recorded."""
    engine = ScriptedEngine(script=AGENTS["codex"].script)
    store = f"sqlite:///{tmp_path}/store.db"
    with (
        serving(engine.app(), lifespan="off") as upstream,
        proxy_process(upstream, store, tmp_path / "proxy.log") as proxy,
    ):
        told = trial("oracle", "none", tmp_path, proxy, "group")
    assert told == {"outcomes": {"completed": 2}, "sandboxes": 2}
    with Store.open(store, create=False) as opened:
        rows = opened.rollouts(limit=None)
    assert [(row.task_id, row.agent, row.outcome, row.reward) for row in rows] == [
        ("make-hello", "oracle", "completed", 1.0)
    ] * 2

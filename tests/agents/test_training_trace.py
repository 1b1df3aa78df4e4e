"""What we write as OpenEnv's training traces is what its own models take."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import environments
from support.cli_agents.recipes import CACHE
from support.transfer.rollout_records import rollout_records
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.jsonl import line_of
from tracegrad_integrations.interchange.training_trace import trace_rows

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(environments.__file__).parent
OPENENV = Recipe(
    name="openenv-trace",
    version="0.10.0",
    dialect="chat",
    installer="pip",
    lock=SCRIPTS / "openenv_trace.txt",
    packages=("openenv==0.10.0",),
    command=("python",),
)


def test_openenv_reads_our_traces() -> None:
    command = [
        install_agent(OPENENV, CACHE).folder / "bin" / "python",
        SCRIPTS / "validate_traces.py",
    ]
    turns = []

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(rollout_records(), min_size=1, max_size=8))
    def check(records: list[RolloutRecord]) -> None:
        lines = b"".join(map(line_of, trace_rows(records, Counter())))
        done = subprocess.run(command, input=lines, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        turns.append(sum(map(int, done.stdout.split())))

    check()
    assert sum(turns) >= 20

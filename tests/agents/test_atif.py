"""What we write as ATIF is what Harbor's own models take, and what they write we read."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from support.harbor.python312 import harbor_python
from support.transfer.rollout_records import rollout_records
from tracegrad.cli.app import app
from tracegrad.store import Store
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.jsonl import line_of
from tracegrad_integrations.interchange.atif_export import trajectory_of

pytestmark = [pytest.mark.agents, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "harbor" / "validate_trajectories.py"


@pytest.mark.skipif(shutil.which("python3.12") is None, reason="Harbor needs python3.12 in PATH")
def test_harbor_reads_our_trajectories() -> None:
    python, read = harbor_python(), []

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(rollout_records(), min_size=1, max_size=8))
    def check(records: list[RolloutRecord]) -> None:
        lines = b"".join(line_of(trajectory_of(record, Counter())) for record in records)
        done = subprocess.run([python, SCRIPT], input=lines, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        read.append(done.stdout.count(b"\n"))

    check()
    assert sum(read) >= 20


@pytest.mark.skipif(shutil.which("python3.12") is None, reason="Harbor needs python3.12 in PATH")
def test_we_read_what_harbor_writes(tmp_path: Path) -> None:
    file = tmp_path / "trajectory.json"
    subprocess.run([harbor_python(), SCRIPT.with_name("write_trajectory.py"), file], check=True)
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        done = CliRunner().invoke(
            app, ["import", "--store", f"sqlite:///{store.database.describe()}", str(file)]
        )
        assert done.stdout == "1 rollout: 1 new, 2 new turns\n", done.output
        [row] = store.rollouts()
        asked, helped = store.rollout_turns(row.rollout_id)
        assert row.agent == "terminus-2"
        assert asked.completion_logprobs.tolist() == [-0.5, -0.25]
        assert (asked.untrainable, helped.untrainable) == (None, "no_tokens")

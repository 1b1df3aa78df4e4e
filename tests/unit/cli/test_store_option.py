"""What commands say of stores and ids that are not as they should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from support.cli.run_rollouts import run
from tracegrad.events import RolloutStarted
from tracegrad.store import Store


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["show", "q"], 1, "tracegrad: no rollout q"),
        (["tree", "q"], 1, "tracegrad: no rollout q"),
        (["explain", "q"], 1, "tracegrad: no rollout q"),
        (["show", "a"], 1, "tracegrad: several rollouts begin with a: a1, a2"),
        (["tree", "a"], 1, "tracegrad: several rollouts begin with a: a1, a2"),
        (["ls", "--store", "nonsense"], 2, "tracegrad: store: 'nonsense' is no URL"),
    ],
)
def test_mistakes_are_one_line(
    store: Store, url: str, arguments: list[str], code: int, line: str
) -> None:
    store.append([RolloutStarted(rollout_id="a1"), RolloutStarted(rollout_id="a2")])
    result = run(url, *arguments, columns=200)
    assert result.exit_code == code
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["ls"], ["explain"], ["show", "a"], ["tree", "a"]])
@pytest.mark.parametrize(
    ("revision", "message"),
    [("9999", ", this tracegrad knows"), ("0008", ", from before the first")],
)
def test_a_store_of_another_version_is_one_line(
    sqlite_url: str, command: list[str], revision: str, message: str
) -> None:
    with Store.open(sqlite_url) as store, store.exclusive() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
    result = run(sqlite_url, *command)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tracegrad: the store has revision {revision}{message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["ls", "explain"])
def test_a_missing_store_is_one_line_and_exit_code_2(tmp_path: Path, command: str) -> None:
    """Through the real entry point, in a folder where nothing ran yet."""
    done = subprocess.run(
        [sys.executable, "-c", "from tracegrad.cli import main; main()", "rollouts", command],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"tracegrad: no store at {tmp_path}/.tracegrad/store.db")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

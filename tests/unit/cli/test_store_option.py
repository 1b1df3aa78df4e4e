"""What commands say of stores and ids that are not as they should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from support.cli.run_rollouts import run, said
from support.store.events import rollout_events
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
def test_a_store_of_a_later_version_is_one_line(store: Store, url: str, command: list[str]) -> None:
    with store.exclusive() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    result = run(url, *command)
    assert result.exit_code == 2
    assert result.stderr.startswith("tracegrad: the store has revision 9999, this tracegrad knows")
    assert result.stderr.count("\n") == 1


def test_a_store_of_an_earlier_version_is_brought_up_to_date(store: Store, url: str) -> None:
    store.append(rollout_events("r"))
    with store.exclusive() as connection:
        tables = ("outcomes", "leases", "version_events", "removals", "turn_texts", "texts")
        for table in (*tables, "task_anchors"):
            connection.execute(text(f"DROP TABLE {table}"))
        later = {
            "steps": ("batch", "run_id", "manifest_digest", "parent_digest"),
            "turns": ("routed_experts", "state_key", "observation"),
            "rewards": ("label", "given_at"),
            "rollout_keys": ("scope",),
        }
        for table, columns in later.items():
            for column in columns:
                connection.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))
        for index in ("ix_turns_parent_id", "ix_turns_request_base"):
            connection.execute(text(f"DROP INDEX {index}"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0002'"))
    assert "completed" in said(url, "ls")
    assert "turn 1 " in said(url, "show", "r")


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

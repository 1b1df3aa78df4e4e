"""`tracegrad export`, run as a user runs it."""

from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from support.store.events import make_span, make_turn
from support.system.small_disk import small_disk
from support.transfer.template_store import fill
from tracegrad.cli.app import app
from tracegrad.events import Json, RolloutStarted
from tracegrad.store import Ledger, StepRecord, Store

NAMES = [
    "turn_id", "parent_turn_id", "rollout_id", "task_id", "agent", "outcome", "reward", "dialect",
    "model", "prompt_token_ids", "completion_token_ids", "completion_logprobs", "policy_versions",
    "finish_reason", "created_at", "trained_step", "skip_reason", "untrainable", "fork_reason",
    "agent_name", "asked_model", "advantage",
]  # fmt: skip


@pytest.fixture
def scene(store: Store) -> Store:
    fill(store)
    turns = [turn.turn_id for turn in store.rollout_turns("d1")]
    Ledger(store).commit_step(
        StepRecord(step=3, version=4), trained=turns[:2], skipped={turns[2]: "stale"},
        rollouts=["d1"], advantages={turns[0]: -0.5},
    )  # fmt: skip
    return store


def run(store: Store, *arguments: str) -> Result:
    url = f"sqlite:///{store.database.describe()}"
    return CliRunner().invoke(app, ["export", *arguments], env={"TRACEGRAD_STORE": url})


def objects(store: Store, *arguments: str) -> list[Json]:
    result = run(store, *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_turns_have_the_names_that_scripts_depend_on(scene: Store) -> None:
    rows = objects(scene, "--turns", "--format", "jsonl", "--task", "chat")
    assert [list(row) for row in rows] == [NAMES] * 3
    turns = scene.rollout_turns("d1")
    for row, turn in zip(rows, turns, strict=True):
        assert row["turn_id"] == turn.turn_id
        assert row["parent_turn_id"] == turn.parent_id
        assert row["prompt_token_ids"] == turn.prompt_token_ids.tolist()
        assert row["completion_token_ids"] == turn.completion_token_ids.tolist()
        assert row["completion_logprobs"] == turn.completion_logprobs.tolist()
        assert row["policy_versions"] == [list(span) for span in turn.policy_versions]
    assert [(row["trained_step"], row["skip_reason"], row["advantage"]) for row in rows] == [
        (3, None, -0.5), (3, None, None), (None, "stale", None),
    ]  # fmt: skip
    assert {(row["outcome"], row["reward"], row["agent"]) for row in rows} == {
        ("completed", 0.25, "shop")
    }


def test_turns_say_why_they_cannot_be_trained_and_why_they_forked(
    store: Store, tmp_path: Path
) -> None:
    store.append([
        make_turn("first"),
        make_turn("cold", untrainable="greedy"),
        make_turn("edited", fork_reason="edited_history"),
        make_turn("long", sampled=(), untrainable="over_length", fork_reason="compaction"),
    ])  # fmt: skip
    found = {
        "first": (None, None),
        "cold": ("greedy", None),
        "edited": (None, "edited_history"),
        "long": ("over_length", "compaction"),
    }
    rows = objects(store, "--turns")
    assert {r["turn_id"]: (r["untrainable"], r["fork_reason"]) for r in rows} == found
    file = tmp_path / "turns.parquet"
    assert run(store, "--turns", "-o", str(file)).exit_code == 0
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert {r["turn_id"]: (r["untrainable"], r["fork_reason"]) for r in rows} == found


def test_turns_say_who_called_and_for_which_model(store: Store, tmp_path: Path) -> None:
    """Who called is known from the call, or from the spans around it, which are not in the file."""
    store.append([
        RolloutStarted(rollout_id="r", agent="planner", opened_at=1.0),
        make_span(1, "r", attributes={"gen_ai.agent.name": "planner"}),
        make_span(2, "r", parent_span_id=f"{1:016x}", attributes={"agent.name": "writer"}),
        make_turn("plain"),
        make_turn("said", agent_name="reviewer", asked_model="coder-model"),
        make_turn("outer", parent_span_id=f"{1:016x}"),
        make_turn("inner", parent_span_id=f"{2:016x}"),
    ])  # fmt: skip
    found = {
        "plain": (None, None),
        "said": ("reviewer", "coder-model"),
        "outer": (None, None),
        "inner": ("writer", None),
    }
    rows = objects(store, "--turns")
    assert {r["turn_id"]: (r["agent_name"], r["asked_model"]) for r in rows} == found
    file = tmp_path / "turns.parquet"
    assert run(store, "--turns", "-o", str(file)).exit_code == 0
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert {r["turn_id"]: (r["agent_name"], r["asked_model"]) for r in rows} == found


@pytest.mark.parametrize(
    ("arguments", "rollouts"),
    [
        ([], ["a1", "a2", "a3", "a4", "b1", "b2", "b3", "c1", "d1", "d2"]),
        (["--task", "stock"], ["c1"]),
        (["--outcome", "open"], ["b3"]),
        (["--min-reward", "0.5", "--max-reward", "0.5"], ["a3", "a4"]),
        (["--min-version", "5"], ["c1", "d1"]),
        (["--until", "1970-01-01"], []),
        (["--agent", "nobody"], []),
        (["--trained"], ["d1"]),
        (["--not-trained", "--task", "chat"], []),
        (["--state", "consumed"], ["d1"]),
    ],
)
def test_filters(scene: Store, arguments: list[str], rollouts: list[str]) -> None:
    found = objects(scene, *arguments)
    assert [row["rollout_id"] for row in found if row["kind"] == "rollout"] == rollouts


def test_trained_turns_alone(scene: Store) -> None:
    assert {row["trained_step"] for row in objects(scene, "--turns", "--trained")} == {3}
    # Rollouts of which no turn was trained; d1's third was skipped, and its rollout consumed.
    rest = objects(scene, "--turns", "--not-trained")
    assert {row["trained_step"] for row in rest} == {None}
    assert len(rest) == 10


def test_steps_come_with_the_rollouts_that_name_them(scene: Store) -> None:
    kinds = [row["kind"] for row in objects(scene, "--task", "chat")]
    assert kinds == ["step", "rollout"]
    assert [row["kind"] for row in objects(scene, "--task", "stock")] == ["rollout"]


def test_text_can_be_left_out(scene: Store) -> None:
    [row] = objects(scene, "--task", "stock", "--no-text")
    assert all("request" not in turn and "response" not in turn for turn in row["turns"])
    assert row["turns"][1]["completion_token_ids"]


@pytest.mark.parametrize("form", ["--turns", "--rollouts"])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_files_load_with_datasets(
    scene: Store, tmp_path: Path, form: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    path = tmp_path / f"rows.{ending}"
    result = run(scene, form, "-o", str(path))
    assert result.exit_code == 0, result.output
    assert str(path) in result.stderr
    kind = "json" if ending == "jsonl" else "parquet"
    loaded: Any = datasets.load_dataset(
        kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    if form == "--turns":
        assert loaded.column_names == NAMES
        by_id = {row["turn_id"]: row for row in loaded}
        [turn] = [t for t in scene.rollout_turns("c1") if t.turn_id == "c1.01"]
        row = by_id["c1.01"]
        assert row["prompt_token_ids"] == turn.prompt_token_ids.tolist()
        assert row["completion_logprobs"] == turn.completion_logprobs.tolist()
        assert row["policy_versions"] == [[5, len(turn.completion_token_ids)]]
    else:
        rows = {row["rollout_id"]: row for row in loaded if row["kind"] == "rollout"}
        assert len(rows) == 10
        assert [turn["turn_id"] for turn in rows["c1"]["turns"]] == ["c1.0", "c1.01"]


def test_counts_are_said_beside_the_rows(scene: Store) -> None:
    result = run(scene)
    assert result.stderr == "exported 1 step, 10 rollouts\n"
    result = run(scene, "--layout", "slime-samples")
    assert result.stderr.splitlines() == [
        "exported 7 rows",
        "left out: infra_error (1 rollout), no_reward (1 rollout), open (1 rollout), "
        "greedy (1 turn)",
    ]
    assert run(scene, "--agent", "nobody").stderr == "exported nothing\n"


def test_a_layout_may_have_a_format_of_its_own(scene: Store, tmp_path: Path) -> None:
    result = run(scene, "--layout", "slime-samples", "-o", str(tmp_path / "0.pt"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "0.pt").read_bytes()[:2] == b"PK"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "parquet"], "parquet needs a file: -o FILE"),
        (["--format", "csv"], "'csv'; write jsonl or parquet"),
        (["-o", "rows.csv"], "'rows.csv' does not say which; write --format jsonl or parquet"),
        (["--layout", "nonsense"], "'nonsense'; there are: "),
        (["--turns", "--rollouts"], "--rollouts, --turns, --layout, --otlp: choose one"),
        (["-o", "/no/such/folder/x.jsonl"], "x.jsonl: No such file or directory; nothing was"),
        (["--outcome", "good"], "'good'; use open, completed"),
    ],
)
def test_mistakes_are_named(scene: Store, arguments: list[str], message: str) -> None:
    result = run(scene, *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_parquet_without_pyarrow_is_one_line(
    scene: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **how: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *more, **how)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run(scene, "-o", str(tmp_path / "x.parquet"))
    assert result.exit_code == 1
    assert result.stderr == ("tracegrad: Parquet needs PyArrow: pip install 'tracegrad[parquet]'\n")
    assert list(tmp_path.glob("*.parquet*")) == []


def test_an_older_file_stays_until_the_new_one_is_whole(scene: Store, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old\n")
    with scene.exclusive() as connection:
        connection.exec_driver_sql("UPDATE turns SET context_digest = x'00' WHERE turn_id = 'd2.0'")
    result = run(scene, "-o", str(path))
    assert result.exit_code == 2
    assert "d2.0" in result.stderr
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir() if "rows" in p.name] == ["rows.jsonl"]


def test_a_full_disk_is_one_line_and_no_file(
    request: pytest.FixtureRequest, scene: Store, tmp_path: Path
) -> None:
    with small_disk(request, tmp_path / "small", mib=1) as disk:
        if disk is None:
            return
        for ending in ("jsonl", "parquet"):
            path = disk.folder / f"rows.{ending}"
            with disk.filled(leave=4096):
                result = run(scene, "-o", str(path))
                assert result.exit_code == 1
                assert result.stderr == (
                    f"tracegrad: {path}: No space left on device; nothing was written\n"
                )
                assert [p.name for p in disk.folder.iterdir()] == ["filler"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_stopped_leaves_no_file(
    scene: Store, tmp_path: Path, how: signal.Signals
) -> None:
    """It is stopped while it writes: rows go on for ever."""
    program = (
        "import itertools\n"
        "from tracegrad.transfer import export_rollouts\n"
        "real = export_rollouts.iter_rollouts\n"
        "export_rollouts.iter_rollouts = lambda *a, **k: "
        "itertools.chain.from_iterable(real(*a, **k) for _ in itertools.repeat(0))\n"
        "from tracegrad.cli import main\n"
        "main()\n"
    )
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "rows.jsonl"
    url = f"sqlite:///{scene.database.describe()}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "export", "-o", str(path), "--store", url],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 100_000 for p in folder.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        _, output = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "Traceback" not in output
    assert list(folder.iterdir()) == []


def test_a_reader_that_has_seen_enough_ends_it_quietly(scene: Store) -> None:
    url = f"sqlite:///{scene.database.describe()}"
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tracegrad.cli", "export", "--store", url],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    os.close(read)
    _, output = process.communicate(timeout=60)
    assert "Traceback" not in output

"""`trainer status` of a long run: right figures, and no more of the store read than they need."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import event

from support.trainer.step_samples import rollout
from tracegrad.events import Event, RolloutStarted
from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.maintenance import RetentionRule, RolloutSelection, prune
from tracegrad_trainer.cli import render_status
from tracegrad_trainer.cli.status import RECENT_STEPS, RunStatus, collect_status

METRICS: dict[str, Any] = {
    "seconds": {"train": 1.0, "wait": 3.0},
    "reward_mean": 0.5,
    "group_spread": 0.25,
    "turns_trained": 6.0,
    "loss": -0.125,
    "grad_norm": 1.5,
    "entropy": 2.0,
    "k3": 1e-3,
    "ess": 0.75,
    "clipped_turn_share": 0.5,
    "staleness_mean": 1.5,
    "gap_max": 1e-6,
    "tokens_per_second": 12345.0,
}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def tagged(name: str, split: str, **more: Any) -> list[Event]:
    facts = rollout(name, name, **more)
    opened = RolloutStarted(rollout_id=name, task_id=name, tags={"split": split}, opened_at=1000.0)
    return [opened, *facts[1:]]


def commit(store: Store, step: int, **more: Any) -> None:
    record = StepRecord(step=step, version=step, metrics=METRICS, checkpoint="c", batch={"x": 1})
    Ledger(store).commit_step(record, **({"trained": [], "skipped": {}, "rollouts": []} | more))


def printed(found: RunStatus, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(render_status.render_status(found))
    return file.getvalue()


def test_a_long_run_is_counted_whole_and_read_in_part(store: Store, tmp_path: Path) -> None:
    steps = RECENT_STEPS + 20
    for step in range(1, steps + 1):
        commit(store, step)
    store.append(rollout("r", "r", reward=1.0, seed=1))
    said: list[str] = []

    def listen(*arguments: Any) -> None:
        said.append(str(arguments[2]).lower())

    event.listen(store._engine, "before_cursor_execute", listen)
    found = collect_status(store, tmp_path, tags={})
    assert (found.steps_total, len(found.steps), found.steps[0]["step"]) == (steps, 10, steps)
    assert found.seconds == {"train": float(RECENT_STEPS), "wait": 3.0 * RECENT_STEPS}
    assert found.seconds_steps == RECENT_STEPS
    assert all(step["batch"] is None and not step["settings"] for step in found.steps)
    of_steps = [sql for sql in said if "from steps" in sql and "count(*)" not in sql]
    curves = [sql for sql in said if "rollouts.finished_at, " in sql]
    assert of_steps
    assert curves
    assert all("limit" in sql for sql in of_steps + curves)
    assert not any("steps.batch" in sql or "steps.settings" in sql for sql in of_steps)


def test_success_is_that_of_each_split(store: Store, tmp_path: Path) -> None:
    for n in range(4):
        store.append(tagged(f"a{n}", "train", reward=float(n % 2), seed=n))
        store.append(tagged(f"b{n}", "held_out", reward=1.0, seed=n))
    found = collect_status(store, tmp_path, tags={})
    assert found.success["train"] == {
        "mean": 0.5,
        "error": pytest.approx((1 / 3) ** 0.5 / 2),
        "rollouts": 4,
    }
    assert found.success["held_out"] == {"mean": 1.0, "error": 0.0, "rollouts": 4}
    assert "all" not in found.success


def test_removed_turns_are_told_apart_from_those_that_are_there(
    store: Store, tmp_path: Path
) -> None:
    for n in range(3):
        store.append(rollout(f"r{n}", "t", reward=1.0, seed=n, at=1000.0 + 100 * n))
    assert collect_status(store, tmp_path, tags={}).removed == {}
    trained = [f"r0.{i}" for i in range(2)]
    commit(store, 1, trained=trained, skipped={"r0.2": "greedy"}, rollouts=["r0"])
    prune(store, RetentionRule(selection=RolloutSelection(before=1050.0)))
    found = collect_status(store, tmp_path, tags={})
    assert found.removed == {"rollouts": 1, "turns": 3, "trained": 2}
    assert (found.turns_captured, found.turns_trained) == (6, 0)
    assert "turns removed" in printed(found, 80)


def test_the_gap_of_the_last_push_that_serves_is_told(store: Store, tmp_path: Path) -> None:
    gap = {"tokens": 64, "mean": 1e-6, "max": 4e-6}
    store.record_version(PolicyVersion(1, 1, "serving", detail={"gap": gap}))
    store.record_version(PolicyVersion(2, 2, "failed", detail={"gap": None, "error": "x"}))
    found = collect_status(store, tmp_path, tags={})
    assert (found.version, found.failed_versions) == (1, [2])
    assert found.push == {"version": 1, "gap": gap}
    assert "1.0e-06 on average, 4.0e-06 at most" in printed(found, 120)


@pytest.mark.parametrize("width", [80, 120])
def test_its_tables_fit_a_terminal(store: Store, tmp_path: Path, width: int) -> None:
    commit(store, 1)
    text = printed(collect_status(store, tmp_path, tags={}), width)
    [head, line] = [each.split() for each in text.splitlines() if " ess" in each or "12k" in each]
    told = dict(zip(head, line, strict=False))
    assert (told["ess"], told["clip"], told["ent."], told["grad"]) == (
        "0.75",
        "50%",
        "2.00",
        "1.5",
    )
    assert "12k" in line
    assert max(map(len, text.splitlines())) <= width

"""A trainer and its drivers, simulated: who waits drops nothing, and groups are cut.

The ledger, the intake and the selection are the real ones; a step is a commit, without a model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from tracegrad.events import Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Store
from tracegrad.store.ledger.intake import Intake
from tracegrad_trainer.cli.status import dropped_shares, lag_shares
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.rl.coordinator import Coordinator, RolloutSupply

GROUPS, SIZE = 2, 3
SET = {
    "batches.groups": GROUPS,
    "batches.group_size": SIZE,
    "batches.max_staleness": 1,
    "data.incomplete_after_s": 3600,
}


class Simulation:
    """Drivers open groups of `attempts`, whole and at once; `eager` ones ask nobody."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
            (folder / name).touch()
        given = SET | {name.replace("__", "."): value for name, value in changes.items()}
        every = {"model": folder, "state_dir": folder, **given}
        self.settings = load_settings(None, [f"{k}={v}" for k, v in every.items()])
        self.store = Store.open(self.settings.proxy.store)
        self.intake = Intake(self.store)
        supply = RolloutSupply(patience_s=0.0)
        self.trainer = Coordinator(self.settings, self.store, stopping=lambda: False, supply=supply)
        self.step = self.opened = 0
        self.metrics: list[dict[str, float]] = []
        self.trainer.report_served(0, [], stepped=False)

    def close(self) -> None:
        self.trainer.close()
        self.store.close()

    def drive(self, groups: int, *, eager: bool) -> int:
        """How many of so many groups were opened."""
        done = 0
        for _ in range(groups):
            places = [] if eager else self.intake.ask().rollout_ids
            if not eager and not places:
                break
            self.open_group(places or [f"r{self.opened}.{n}" for n in range(SIZE)])
            done += 1
        return done

    def open_group(self, ids: list[str]) -> None:
        self.opened += 1
        at = time.time() - 1  # of all: one opened after the group is whole belongs to the next
        for number, rollout_id in enumerate(ids):
            self.store.append(
                rollout_events(
                    rollout_id,
                    task=f"task {self.opened}",
                    reward=float(number % 2),
                    at=at,
                    version=self.step,
                )
            )

    def train(self) -> bool:
        """One step, if there is a batch; its weights are served, and then it is committed."""
        batch = self.trainer.next_batch(self.step)
        if batch is None:
            return False
        self.step += 1
        made = self.trainer.record(
            batch, step=self.step, version=self.step, metrics={}, dropped_rows=[], weights=0
        )
        self.metrics.append(made.step.metrics)
        self.trainer.report_served(self.step, batch.groups, stepped=True)
        self.trainer.commit([made], batch.groups)
        return True

    def skipped(self) -> dict[str, int]:
        return dict(self.store.turn_counts().skipped)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    started: list[Simulation] = []

    def start(**changes: Any) -> Simulation:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Simulation(folder, **changes))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_drivers_who_wait_lose_nothing_that_eager_ones_do(run: Any) -> None:
    """Both could do twice what the trainer takes."""
    drop, wait = run(batches__stale="drop"), run(batches__stale="wait")
    waits = 0
    for _ in range(8):
        drop.drive(2 * GROUPS, eager=True)
        waits += wait.drive(2 * GROUPS, eager=False) < 2 * GROUPS
        drop.train()
        wait.train()
    assert drop.skipped()["stale"] > 0
    assert wait.skipped() == {}
    assert waits > 4, "they were held back"
    assert set(lag_shares(wait.metrics)) == {"0", "1"}, "as old as allowed, no older"
    assert dropped_shares(wait.store.turn_counts())["stale"] == 0
    assert dropped_shares(drop.store.turn_counts())["stale"] > 0.2


def test_a_synchronous_run_is_on_policy(run: Any) -> None:
    simulation = run(data__synchronous="true")
    for _ in range(4):
        assert simulation.drive(9, eager=False) == GROUPS, "the next batch, and no more"
        assert simulation.train()
    assert lag_shares(simulation.metrics) == {"0": 1.0}
    assert [metrics["intake_places"] for metrics in simulation.metrics[1:]] == [6.0] * 3


def test_over_sampled_groups_are_cut_and_counted(run: Any) -> None:
    simulation = run(data__over_sample=2, data__synchronous="true")
    for _ in range(3):
        assert simulation.drive(9, eager=False) == GROUPS
        assert simulation.train()
    assert {metrics["rollouts"] for metrics in simulation.metrics} == {float(GROUPS * SIZE)}
    # Two attempts of each group, of two turns each.
    assert simulation.skipped() == {"over_sampled": 3 * GROUPS * 2 * 2}


def test_a_slow_attempt_is_waited_for_by_nobody(run: Any) -> None:
    simulation = run(data__over_sample=1, data__synchronous="true")
    for step in range(2):
        for group in range(GROUPS):
            *fast, slow = simulation.intake.ask().rollout_ids
            now = time.time() - 1
            task = f"task {step} {group}"
            for number, name in enumerate(fast):
                simulation.store.append(
                    rollout_events(name, task=task, reward=float(number % 2), at=now, version=step)
                )
            simulation.store.append([RolloutStarted(rollout_id=slow, task_id=task, opened_at=now)])
        assert simulation.train()
        ended = [
            make_turn(f"{slow}.0", slow, version=step),
            Reward(rollout_id=slow, value=1.0),
            RolloutFinished(rollout_id=slow, outcome=Outcome.COMPLETED, finished_at=time.time()),
        ]
        simulation.store.append(ended)
    assert simulation.trainer.next_batch(2) is None
    assert simulation.skipped() == {"over_sampled": 2}


def test_groups_without_a_signal_are_replaced_within_the_bounds(run: Any) -> None:
    """All rewards of a group are equal, and it is held, where the batch refills: others may be
    opened in its place, or no step would ever be made."""
    simulation = run(data__refill="true", data__synchronous="true")
    for _ in range(GROUPS):
        ids = simulation.intake.ask().rollout_ids
        for name in ids:
            events = rollout_events(name, task=f"dull {ids[0]}", at=time.time() - 1)
            simulation.store.append(events)
    assert not simulation.train()
    assert simulation.drive(9, eager=False) == GROUPS
    assert simulation.train()
    assert Counter(simulation.skipped()) == {"equal_reward": GROUPS * SIZE * 2}


def test_a_trainer_that_ends_lets_everybody_go_on(run: Any) -> None:
    simulation = run(data__synchronous="true")
    assert simulation.drive(9, eager=False) == GROUPS
    assert simulation.trainer.intake is not None
    simulation.trainer.intake.withdraw()
    assert simulation.drive(3, eager=False) == 3

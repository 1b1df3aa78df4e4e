"""Two state folders on one store, killed and started again: each turn is trained once, and the
weights are the chain of the steps that were committed, whoever made them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from support.store.kill_runs import drawn_seed
from support.trainer.kill_runs import Runs, fates, log_of, step_runs
from support.trainer.prepared_run import fill, settings_of, steps_of
from tracegrad.store import StepRecord, Store
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad.store.maintenance import examine

KILLED, REFUSED = -9, 1
POINTS = ["whole, not committed", "before the commit", "after the commit", "leased, not trained"]


@dataclass
class Trainer:
    runs: Runs
    settings: Path
    state_dir: Path

    def run(self, **order: object) -> int:
        [status] = self.runs.run(self.settings, **order)
        return status

    def checkpoint(self, step: int) -> Path:
        return self.state_dir / "checkpoints" / f"step-{step:08d}"


@dataclass
class Scene:
    url: str
    turns: list[str]
    one: Trainer
    other: Trainer

    def check(self) -> list[StepRecord]:
        """That nothing was trained twice or lost, and that the weights are a chain."""
        assert set(fates(self.url)) == set(self.turns)
        steps = steps_of(self.url)
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        for before, step in pairwise(steps):
            assert step.parent_digest == before.manifest_digest
        for step in steps:
            assert manifest_digest(Path(step.checkpoint or "")) == step.manifest_digest
        with Store.open(self.url) as store:
            counts = store.turn_counts()
            found = [
                f for f in examine(store).findings if f.check in ("weights", "twice", "leases")
            ]
        assert (counts.captured, counts.pending) == (len(self.turns), {})
        assert found == []
        return steps


@pytest.fixture(scope="module")
def pair(runs: Runs) -> Iterator[tuple[Runs, Runs]]:
    with step_runs() as other:
        yield runs, other


@pytest.fixture
def scene(pair: tuple[Runs, Runs], model: Path, tmp_path: Path) -> Scene:
    url = f"sqlite:///{tmp_path}/store.db"
    trainers = []
    for each, name in zip(pair, ("one", "other"), strict=True):
        state = tmp_path / name
        state.mkdir()
        settings = settings_of(model, state, proxy__store=url, checkpoint__keep=99)
        file = tmp_path / f"{name}.json"
        file.write_text(settings.model_dump_json())
        trainers.append(Trainer(each, file, state))
    return Scene(url, fill(url, groups=12), *trainers)


def test_a_run_killed_before_its_commit_goes_on_from_what_another_committed(scene: Scene) -> None:
    one, other = scene.one, scene.other
    assert other.run(at="before the commit") == KILLED
    assert other.checkpoint(1).is_dir(), "whole, and nobody committed it"
    assert one.run(steps=1) == 0, log_of(one.settings)
    [first] = steps_of(scene.url)
    assert manifest_digest(other.checkpoint(1)) != first.manifest_digest
    assert other.run() == 0, log_of(other.settings)
    steps = scene.check()
    assert len({step.run_id for step in steps}) == 2
    assert steps[1].checkpoint == str(other.checkpoint(2))
    # Without the committed checkpoint, its own of the same number is not taken for it.
    assert one.run(steps=1) == 0, "the chain goes on in the first folder too"


def side_by_side(scene: Scene, **order: object) -> list[int]:
    """How both ended."""
    ended: list[int] = []
    both = [
        threading.Thread(target=lambda each=each: ended.append(each.run(**order)))
        for each in (scene.one, scene.other)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return ended


def test_of_two_trainers_at_once_the_one_that_is_refused_says_why(scene: Scene) -> None:
    """Who commits a number second is refused, and leaves nothing that a restart could load."""
    ended = side_by_side(scene)
    logs = log_of(scene.one.settings) + log_of(scene.other.settings)
    assert set(ended) <= {0, REFUSED}, logs
    assert logs.count("is given up and its checkpoint removed") == ended.count(REFUSED), logs
    committed = {step.checkpoint for step in steps_of(scene.url)}
    for trainer in (scene.one, scene.other):
        left = {str(each) for each in (trainer.state_dir / "checkpoints").glob("*")}
        assert left <= committed
    for trainer in (scene.one, scene.other):
        assert trainer.run() == 0, log_of(trainer.settings)
    scene.check()
    print(f"ended: {ended}")


def test_two_trainers_on_one_store_killed_at_will_train_every_turn_once(scene: Scene) -> None:
    draw = random.Random(drawn_seed())
    ended: list[int] = []

    def live(trainer: Trainer, seed: float) -> None:
        mine = random.Random(seed)
        for _ in range(4):
            ended.append(trainer.run(at=mine.choice(POINTS), nth=mine.choice([1, 2]), steps=2))

    both = [
        threading.Thread(target=live, args=(trainer, draw.random()))
        for trainer in (scene.one, scene.other)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert set(ended) <= {0, KILLED, REFUSED}, log_of(scene.one.settings)
    for trainer in (scene.one, scene.other):
        assert trainer.run() == 0, log_of(trainer.settings)
    scene.check()
    print(f"ended: {ended}; {len(steps_of(scene.url))} steps")

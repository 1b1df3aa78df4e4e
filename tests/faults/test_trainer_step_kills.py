"""`trainer step` killed with SIGKILL at random moments and at chosen points, and started again:
losses, metrics, weights and optimizer are, bit by bit, those of a run that nobody killed, and each
turn is trained exactly once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.proxy.servers import eventually
from support.store.kill_runs import drawn_seed
from support.system.process_tree import ProcessTree
from support.trainer.kill_runs import Runs, fates, log_of, made, same, state_of
from support.trainer.killed_process import POINTS
from support.trainer.prepared_run import SMALL, fill, settings_of
from tracegrad_trainer.engine.checkpoint.manifest import list_checkpoints

GROUPS = 20
# Steps, fates of turns, the state of the last checkpoint.
Left = tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]
KILLED = -9
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@dataclass
class Scene:
    """A run's folder and store, and how often it was killed where."""

    runs: Runs
    model: Path
    folder: Path
    url: str
    ranks: int
    groups: int = GROUPS
    every_steps: int = 1  # from one checkpoint to the next
    turns: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        settings = settings_of(self.model, self.folder / "state", **self.changes())
        self.settings = self.folder / "settings.json"
        self.settings.write_text(settings.model_dump_json())
        self.turns = fill(self.url, groups=self.groups)

    def changes(self) -> dict[str, object]:
        return {
            "proxy__store": self.url,
            "objective__advantage": "running",  # it remembers, from step to step
            "batches__drop_equal_reward": "true",  # so that some are skipped
            "checkpoint__keep": 2,
            "checkpoint__every_steps": self.every_steps,
            "optim__minibatches": 2,
        }

    def command(self) -> list[str]:
        """`trainer step` on it, as a person types it."""
        named = {name.replace("__", "."): value for name, value in self.changes().items()}
        every = {"model": self.model, "state_dir": self.folder / "state", **SMALL, **named}
        sets = [f"--set={name}={value}" for name, value in every.items()]
        return [str(Path(sys.executable).parent / "trainer"), "step", "--steps", "999", *sets]

    def run(self, **order: Any) -> bool:
        """Whether it came to its end; else it was killed."""
        statuses = self.runs.run(self.settings, ranks=self.ranks, **order)
        assert set(statuses) <= {0, KILLED} or KILLED in statuses, log_of(self.settings)
        return set(statuses) == {0}

    def left(self) -> Left:
        last = list_checkpoints(self.folder / "state" / "checkpoints")[-1]
        return made(self.url), fates(self.url), state_of(last, self.folder / "whole.pt")


@pytest.fixture(scope="module")
def unkilled(
    runs: Runs, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Left]:
    """What a run of so many ranks leaves that nobody killed; made once."""

    @cache
    def left(ranks: int) -> Left:
        folder = tmp_path_factory.mktemp(f"unkilled-{ranks}")
        scene = Scene(runs, model, folder / "run", next(sqlite_urls(folder)), ranks)
        assert scene.run(), log_of(scene.settings)
        assert len(made(scene.url)) >= 8, "there is something to be killed in"
        return scene.left()

    return left


def kill_at_each_point(scene: Scene) -> None:
    """Each of POINTS is one where a run is killed: what the others draw from is not out of date.

    The run goes on after each kill. Skipped groups come first: later on there may be none.
    """
    for point in sorted(POINTS, key=lambda name: name != "skipped groups consumed"):
        assert not scene.run(at=point), point
        scene.kills[point] += 1
    assert scene.run()


def kill_until_done(scene: Scene, draw: random.Random, *, longest_s: float, most: int) -> None:
    """Alternately at a moment and at a point; from `most` kills on it may come to its end."""
    while scene.kills.total() < most:
        if draw.random() < 0.5:
            where = "a moment"
            order: dict[str, Any] = {"after_s": draw.uniform(0, longest_s)}
        else:
            where = draw.choice(list(POINTS))
            order = {"at": where, "nth": draw.choice([1, 1, 2])}
        if scene.run(**order, alone=draw.random() < 0.5):
            return
        scene.kills[where] += 1
    assert scene.run()


def check(scene: Scene, expected: Left) -> None:
    steps, turns, state = scene.left()
    wanted_steps, wanted_turns, wanted_state = expected
    same(steps, wanted_steps)
    assert turns == wanted_turns
    assert set(turns) == set(scene.turns)
    same(state, wanted_state)


def try_until(
    kills: int,
    runs: Runs,
    model: Path,
    folder: Path,
    urls: Iterator[str],
    expected: Left,
    *,
    ranks: int = 1,
    every_steps: int = 1,
    each_point: bool = False,
) -> None:
    draw = random.Random(drawn_seed())
    seen: Counter[str] = Counter()
    while seen.total() < kills:
        place = folder / f"killed-{seen.total()}"
        scene = Scene(runs, model, place, next(urls), ranks, every_steps=every_steps)
        if each_point and not seen:
            kill_at_each_point(scene)
        else:
            kill_until_done(scene, draw, longest_s=3.0, most=kills - seen.total())
        check(scene, expected)
        seen += scene.kills
        shutil.rmtree(scene.folder)
    print(f"{seen.total()} kills: {dict(seen)}")


def sqlite_urls(folder: Path) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"sqlite:///{folder / f'store-{number}.db'}"


@pytest.mark.parametrize(("ranks", "kills", "every_steps"), [(1, 18, 1), (2, 8, 3)])
def test_a_killed_run_that_goes_on_is_the_run_that_nobody_killed(
    ranks: int,
    kills: int,
    every_steps: int,
    runs: Runs,
    model: Path,
    tmp_path: Path,
    unkilled: Callable[[int], Left],
) -> None:
    """That one had a checkpoint of every step: how often there is one changes nothing."""
    try_until(
        kills,
        runs,
        model,
        tmp_path,
        sqlite_urls(tmp_path),
        unkilled(ranks),
        ranks=ranks,
        every_steps=every_steps,
        each_point=ranks == 1,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_kills(
    ranks: int, runs: Runs, model: Path, tmp_path: Path, unkilled: Callable[[int], Left]
) -> None:
    urls = sqlite_urls(tmp_path)
    try_until(200, runs, model, tmp_path, urls, unkilled(ranks), ranks=ranks)


def test_a_killed_run_on_postgresql(
    runs: Runs,
    model: Path,
    tmp_path: Path,
    postgres_server: Any,
    unkilled: Callable[[int], Left],
) -> None:
    """It ends as the run on SQLite does that nobody killed."""
    urls = iter(postgres_server.new_database, None)
    try_until(4, runs, model, tmp_path, urls, unkilled(1), every_steps=2)


@pytest.mark.timeout(1200)
def test_a_killed_command_leaves_nobody_behind_and_goes_on(
    runs: Runs, model: Path, tmp_path: Path
) -> None:
    """The program itself is killed, as a person would; its launcher and its ranks end with it."""
    urls = sqlite_urls(tmp_path)
    expected = Scene(runs, model, tmp_path / "unkilled", next(urls), ranks=1, groups=36)
    assert expected.run()
    killed = Scene(runs, model, tmp_path / "killed", next(urls), ranks=1, groups=36)
    first = subprocess.Popen(killed.command(), stdout=subprocess.DEVNULL, env=ONE_THREAD)
    family = ProcessTree(first.pid)
    # On a busy machine it takes minutes; a command that ends before is seen at once.
    eventually(lambda: len(made(killed.url)) >= 2 or first.poll() is not None, 600)
    first.kill()
    first.wait()
    assert family.gone(within_s=30) == []
    family.end()
    assert len(made(killed.url)) < len(made(expected.url)), "killed before its end"
    again = subprocess.run(
        killed.command(), capture_output=True, text=True, timeout=240, env=ONE_THREAD
    )
    assert again.returncode == 0, again.stdout + again.stderr
    check(killed, expected.left())

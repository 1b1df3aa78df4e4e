"""`make cli-agent`: its tasks, its warm start, its recipe, and when a run came out as it must."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from examples.cli_agent import __main__ as cli
from examples.cli_agent import sandboxes, tasks, warm_start
from examples.shop.rollouts import Score
from examples.shop.screen import Screen

from tracegrad.runner.recipe_files import find_recipe


def test_no_command_of_a_held_out_task_is_trained_on() -> None:
    held_out, train = tasks.of("held_out"), tasks.of("train")
    assert (len(held_out), len(train)) == (60, 120)
    assert {task.command for task in held_out}.isdisjoint(task.command for task in train)
    assert set(islice(tasks.train_tasks(seed=3), 120)) == set(train)
    assert sorted(task.task_id for task in tasks.held_out()) == sorted(
        task.task_id for task in held_out
    )
    assert tasks.held_out(12) == tasks.held_out(12)


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("part", ["count", "file", "answer"])
def test_all_words_are_equally_frequent_in_a_split(split: tasks.Split, part: str) -> None:
    counts = Counter(getattr(task, part) for task in tasks.of(split))
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("task", tasks.held_out(9), ids=lambda task: task.task_id)
def test_the_right_command_and_a_submission_are_rewarded(task: tasks.Task, tmp_path: Path) -> None:
    folder = tasks.workspace(tmp_path / "files")
    trajectory = folder / tasks.TRAJECTORY

    def reward(command: str, status: str) -> int:
        (folder / task.answer).unlink(missing_ok=True)
        trajectory.write_text(json.dumps({"info": {"exit_status": status}}, indent=2))
        subprocess.run(command, shell=True, cwd=folder, check=True)
        done = subprocess.run(task.reward, shell=True, cwd=folder, capture_output=True, check=False)
        return done.returncode

    assert reward(task.command, "Submitted") == 0
    assert reward(task.command, "LimitsExceeded") == 1
    assert reward(task.careless_command, "Submitted") == 1
    assert reward("true", "Submitted") == 1


def test_a_coin_is_fair_and_always_says_the_same_of_a_rollout() -> None:
    def toss(rollout_id: str) -> int:
        environ = {"TRACEGRAD_ROLLOUT_ID": rollout_id, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(sandboxes.COIN, shell=True, env=environ, check=False)
        return done.returncode

    tosses = [toss(f"rollout-{number}") for number in range(60)]
    assert 18 <= sum(tosses) <= 42
    assert tosses[:5] == [toss(f"rollout-{number}") for number in range(5)]
    assert set(tosses) == {0, 1}


def test_the_recipe_is_minis_own_and_says_what_was_demonstrated() -> None:
    own = find_recipe(str(sandboxes.RECIPE))
    shipped = find_recipe("mini-swe-agent")
    assert (own.version, own.packages) == (shipped.version, shipped.packages)
    assert own.lock is not None
    assert shipped.lock is not None
    assert own.lock.samefile(shipped.lock)
    settings = own.files["mini.yaml"]
    assert f"system_template: {warm_start.SYSTEM}\n" in settings
    assert tasks.TRAJECTORY in own.command


def test_most_demonstrations_are_careless_and_all_submit() -> None:
    rng, recipe = random.Random(0), warm_start.Recipe()
    trained = {task.prompt: task for task in tasks.of("train")}
    careless = 0
    for _ in range(400):
        _, asked, *rest = warm_start.demonstration(rng, recipe)
        task = trained[asked["content"]]
        said = [
            m["tool_calls"][0]["function"]["arguments"]["command"]
            for m in rest
            if m.get("tool_calls")
        ]
        assert said[-1] == tasks.SUBMIT
        assert set(said[:-1]) in ({task.command}, {task.careless_command})
        careless += said[0] == task.careless_command
    assert careless / 400 == pytest.approx(recipe.careless, abs=0.08)


SEEDS, (STILL, *COINS) = cli.variants(cli.LONG)[:3], cli.variants(cli.LONG)[3:]
BEFORE = Score(40, 120)
RISEN = [(seed, Score(50, 60)) for seed in SEEDS]  # by .50, so that .25 is a drift


def wrong(*results: tuple[cli.Variant, Score]) -> list[str | None]:
    return cli.verdicts([*RISEN, *results], 0.3, BEFORE)[len(RISEN) :]


def test_each_seed_must_rise() -> None:
    found = cli.verdicts(
        [(seed, Score(n, 60)) for seed, n in zip(SEEDS, (38, 37, 39), strict=True)], 0.3, BEFORE
    )
    assert found == [None, "rose by +0.28; at least +0.30 is expected", None]


@pytest.mark.parametrize(
    ("after", "problem"),
    [(2, None), (33, None), (34, "rose by +0.23, more than chance (0.23)")],
)
def test_weights_that_do_not_move_must_not_rise(after: int, problem: str | None) -> None:
    assert wrong((STILL, Score(after, 60))) == [problem]


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        # One that lands high is nothing if the other lands low.
        ((50, 19), None),
        ((39, 30), None),
        ((40, 31), "all coins together rose by +0.26, more than chance (0.25)"),
    ],
)
def test_coins_are_judged_together(after: tuple[int, int], problem: str | None) -> None:
    results = [(coin, Score(n, 60)) for coin, n in zip(COINS, after, strict=True)]
    assert wrong(*results) == [problem] * 2


def test_where_seeds_hardly_rise_coins_may_not_either() -> None:
    results = [(coin, Score(n, 60)) for coin, n in zip(COINS, (40, 30), strict=True)]
    seeds = [(seed, Score(24, 60)) for seed in SEEDS]
    assert None not in cli.verdicts([*seeds, *results], 0.3, BEFORE)


def test_the_short_form_does_not_ask_how_far_it_rose() -> None:
    (seed,) = cli.variants(cli.SHORT)
    assert cli.verdicts([(seed, Score(0, 6))], cli.SHORT.required, Score(3, 6)) == [None]


def test_without_an_engine_it_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(sandboxes, "install_agent", lambda recipe: pytest.fail("installed"))
    with pytest.raises(sandboxes.Unusable, match="no Docker engine at unix:///nowhere"):
        sandboxes.install(Screen(), sandboxes.spec_of(local=False, image="a"))

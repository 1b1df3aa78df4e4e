"""What `trainer sft` learns in which step, and what it only measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.trainer.sft_samples import char_model, rollout, settings, store_at
from tracegrad_trainer.sft.config import SftSettings
from tracegrad_trainer.sft.dataset import choose_examples
from tracegrad_trainer.sft.schedule import (
    SftData,
    TrainingUnit,
    build_data,
    data_digest,
    plan_epoch,
    split_held_out,
)

TWO = [([5, 6], [8, 2]), ([1], [9, 2])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return char_model(tmp_path_factory.mktemp("plan") / "model")


def data(folder: Path, asked: SftSettings) -> SftData:
    with store_at(folder) as store:
        found = choose_examples(
            store, asked.rollout_filter, writer=None, compared=asked.compares_rollouts
        )
    return build_data(found, asked)


def fill(folder: Path, *rollouts: tuple[str, str, float]) -> None:
    """(id, task, reward) of each."""
    with store_at(folder) as store:
        for number, (name, task, reward) in enumerate(rollouts):
            turns = [([5, 6], [10 + number, 2]), ([1], [9, 2])]
            store.append(rollout(name, turns, task=task, reward=reward))


def test_only_a_model_is_written_over_and_never_the_one_that_it_begins_with(
    tmp_path: Path, model: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    settings(model, tmp_path, out=mine)
    (mine / "thesis.txt").write_text("irreplaceable")
    for wrong, words in ((mine, "it holds something else"), (model, "begins with the model")):
        with pytest.raises(ValueError, match=words):
            settings(model, tmp_path, out=wrong)
    (mine / "config.json").write_text("{}")
    (mine / "model.safetensors").write_text("")
    settings(model, tmp_path, out=mine)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_an_epoch_sees_each_unit_once_and_no_step_is_fuller_than_asked(
    sizes: list[int], budget: int, seed: int, epoch: int
) -> None:
    steps = plan_epoch(sizes, budget, seed=seed, epoch=epoch)
    assert sorted(unit for step in steps for unit in step) == list(range(len(sizes)))
    for step, later in zip(steps, [*steps[1:], None], strict=True):
        total = sum(sizes[unit] for unit in step)
        assert len(step) == 1 or total <= budget
        if later is not None:  # full: the next one had no room
            assert total + sizes[later[0]] > budget
    assert steps == plan_epoch(sizes, budget, seed=seed, epoch=epoch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {str(plan_epoch([1] * 20, 4, seed=s, epoch=e)) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.floats(0, 0.9), st.integers(0, 3))
def test_whole_tasks_are_held_out_in_the_share_that_was_asked(
    tasks: list[int], share: float, seed: int
) -> None:
    units = [TrainingUnit(f"task {task}", ()) for task in tasks]
    learnt, out = split_held_out(units, share, seed)
    assert len(learnt) + len(out) == len(units)
    assert not {u.group_id for u in learnt} & {u.group_id for u in out}
    assert len({u.group_id for u in out}) == int(len(set(tasks)) * share)
    assert learnt


def test_a_task_that_is_held_out_stays_so_when_more_tasks_come() -> None:
    def held(count: int) -> set[str]:
        units = [TrainingUnit(str(task), ()) for task in range(count)]
        return {unit.group_id for unit in split_held_out(units, 0.2, seed=1)[1]}

    before, after = held(50), held(60)
    assert len(before & after) >= 8
    assert len(before) == 10


def test_sft_learns_every_token_that_was_said_and_dpo_pairs_of_one_task(
    tmp_path: Path, model: Path
) -> None:
    fill(tmp_path, ("a", "t", 1.0), ("b", "t", 0.0), ("c", "t", 0.5), ("d", "u", 1.0))
    sft = data(tmp_path, settings(model, tmp_path, held_out=0))
    assert [len(unit.rows) for unit in sft.train] == [1, 1, 1, 1]
    assert sum(unit.targets for unit in sft.train) == 16
    dpo = data(tmp_path, settings(model, tmp_path, preset="dpo", held_out=0))
    [pair] = dpo.train
    assert [(row.rollout_id, row.label) for row in pair.rows] == [("a", 1), ("b", -1)]
    assert dpo.pairs == 1
    assert dpo.reasons == {"turns: unpaired": 2, "turns: equal_reward": 2}
    every = data(tmp_path, settings(model, tmp_path, preset="dpo", pairs="all", held_out=0))
    assert [[row.rollout_id for row in unit.rows] for unit in every.train] == [
        ["a", "b"],
        ["a", "c"],
        ["c", "b"],
    ]


def test_kto_labels_each_row_by_its_tasks_mean(tmp_path: Path, model: Path) -> None:
    fill(tmp_path, ("a", "t", 1.0), ("b", "t", 0.0), ("c", "t", 0.8))
    found = data(tmp_path, settings(model, tmp_path, preset="kto", held_out=0))
    assert {unit.rows[0].rollout_id: unit.rows[0].label for unit in found.train} == {
        "a": 1,
        "b": -1,
        "c": 1,
    }


@pytest.mark.parametrize(
    ("rollouts", "preset", "line"),
    [
        ([], "sft", "no rollouts match; `tracegrad rollouts ls` takes the same filters"),
        ([("a", "t", 1.0), ("b", "t", 1.0)], "dpo", "no pairs: rewards are equal within every"),
        ([("a", "t", 1.0), ("b", "u", 0.0)], "dpo", "no pairs: rewards are equal within every"),
        ([("a", "t", 1.0), ("b", "t", 1.0)], "kto", "no better and worse rollouts: rewards"),
    ],
)
def test_where_there_is_nothing_to_learn_one_line_says_why(
    tmp_path: Path, model: Path, rollouts: Any, preset: str, line: str
) -> None:
    fill(tmp_path, *rollouts)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the line is what is tested
        data(tmp_path, settings(model, tmp_path, preset=preset))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_turns_that_fit_into_no_row_are_counted(tmp_path: Path, model: Path) -> None:
    fill(tmp_path, ("a", "t", 1.0))
    small = {"tokens_per_micro_batch": 5}
    found = data(tmp_path, settings(model, tmp_path, batches=small, held_out=0))
    assert found.reasons == {"turns: over_long": 1}
    assert [unit.targets for unit in found.train] == [2]


def test_a_run_is_named_by_all_that_decides_its_weights(tmp_path: Path, model: Path) -> None:
    fill(tmp_path, ("a", "t", 1.0), ("b", "u", 1.0))
    plain = settings(model, tmp_path, held_out=0.5)
    found = data(tmp_path, plain)
    name = data_digest(found, plain)
    assert name == data_digest(data(tmp_path, plain), plain)
    other_rate = settings(model, tmp_path, held_out=0.5, optim={"lr": 2e-2})
    more_ranks = settings(model, tmp_path, held_out=0.5, ranks=2)
    saved_often = settings(model, tmp_path, held_out=0.5, save_every=1)
    assert name != data_digest(found, other_rate)
    assert name == data_digest(found, more_ranks) == data_digest(found, saved_often)
    of_groups = settings(
        model, tmp_path, held_out=0.5, optim={"lr": 1e-2, "scale_by_groups": False}
    )
    assert name == data_digest(found, of_groups), "so that runs of earlier versions go on"
    fill(tmp_path / "more", ("a", "t", 1.0), ("b", "u", 1.0), ("c", "v", 1.0))
    assert name != data_digest(data(tmp_path / "more", plain), plain)


def test_wrong_settings_are_named(tmp_path: Path, model: Path) -> None:
    for changes, line in (
        ({"pairs": "some"}, "--pairs: Input should be 'best_worst' or 'all'"),
        ({"mask": "nowhere:f"}, "--mask: .*nowhere"),
        ({"held_out": 1.0}, "--held-out: Input should be less than 1"),
    ):
        with pytest.raises(ValueError, match=line):
            settings(model, tmp_path, **changes)
    with pytest.raises(ValueError, match=r"--preset|unknown preset"):
        settings(model, tmp_path, preset="ppo")


def test_rows_do_not_depend_on_which_rank_asks(tmp_path: Path, model: Path) -> None:
    fill(tmp_path, ("a", "t", 1.0), ("b", "u", 1.0))
    one, two = (data(tmp_path, settings(model, tmp_path)) for _ in range(2))
    for left, right in zip(one.train, two.train, strict=True):
        for a, b in zip(left.rows, right.rows, strict=True):
            assert np.array_equal(a.input_ids, b.input_ids)

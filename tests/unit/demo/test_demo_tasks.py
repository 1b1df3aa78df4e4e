from collections import Counter
from itertools import islice

import pytest

from shop import agent, tasks
from shop.tasks import CITIES, ITEMS, KINDS, Split, Task

SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")


def test_splits_share_no_pair_and_miss_none() -> None:
    owned = [pair for split in SPLITS for pair in tasks.pairs(split)]
    assert len(owned) == len(set(owned)) == len(ITEMS) * len(CITIES)


@pytest.mark.parametrize("split", SPLITS)
def test_names_are_equally_frequent_in_a_split(split: Split) -> None:
    for position in (0, 1):
        counts = Counter(pair[position] for pair in tasks.pairs(split))
        assert len(counts) == 14
        assert len(set(counts.values())) == 1


@pytest.mark.parametrize("split", ["validation", "held_out"])
def test_an_exam_is_distinct_balanced_and_of_its_split(split: Split) -> None:
    exam = tasks.exam(split)
    assert len({task.question for task in exam}) == len({task.task_id for task in exam}) == 200
    assert {(task.item, task.city) for task in exam} == set(tasks.pairs(split))
    assert sorted(Counter(task.kind for task in exam).values()) == [66, 67, 67]
    assert exam == tasks.exam(split)


def test_an_exam_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="count: split 'held_out' has too few questions"):
        tasks.exam("held_out", 1000)


def test_training_asks_nothing_about_pairs_of_other_splits() -> None:
    asked = list(islice(tasks.train_tasks(seed=3), 900))
    assert {(task.item, task.city) for task in asked} == set(tasks.pairs("train"))
    assert Counter(task.kind for task in asked) == dict.fromkeys(KINDS, 300)
    assert len({task.task_id for task in asked[:480]}) == 480
    assert asked != list(islice(tasks.train_tasks(seed=4), 900))


@pytest.mark.parametrize("task", tasks.exam("validation", 60), ids=lambda task: task.task_id)
def test_the_right_tools_and_only_they_lead_to_the_answer(task: Task) -> None:
    where = {"item": task.item, "city": task.city}
    right = str(agent.FUNCTIONS["stock" if task.kind == "stock" else "price"](**where))
    wrong = str(agent.FUNCTIONS["forecast" if task.kind == "stock" else "list_price"](**where))
    if task.kind == "total":
        wrong, right = right, agent.run_tool("multiply", f'{{"a": {task.quantity}, "b": {right}}}')
    assert task.reward(f" {right}\n") == 1.0
    assert task.reward(wrong) == task.reward(f"{right}0") == task.reward(None) == 0.0


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "[1]", "null", '"lamp"', "{}", '{"item": "lamp"}', '{"item": [], "city": {}}',
     '{"item": "lamp", "city": "Atlantis"}', '{"item": "lamp", "city": "Oslo", "x": 1}'],
)  # fmt: skip
def test_a_malformed_tool_call_is_an_error_for_the_model_to_read(arguments: str) -> None:
    assert agent.run_tool("stock", arguments) == "error"
    assert agent.run_tool("no_such_tool", arguments) == "error"
    assert agent.run_tool("multiply", '{"a": "x", "b": 1}') == "error"

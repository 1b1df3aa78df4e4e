"""Groups of rollouts that were asked something similar: what holds whatever came, and in words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracegrad_trainer.rewards.similar_tasks import (
    TaskText,
    form_similar_groups,
    left_alone,
    similar_task_id,
    similarity,
    task_text,
)

WORDS = st.frozensets(st.sampled_from("abcdef"), max_size=4)
LEAST = st.sampled_from([0.2, 0.5, 1.0])


@st.composite
def some_tasks(draw: st.DrawFn) -> list[TaskText]:
    """Several may have ended at once."""
    asked = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("xy"), WORDS), max_size=14))
    return [TaskText(f"r{i}", float(at), kind, words) for i, (at, kind, words) in enumerate(asked)]


def names(groups: list[list[TaskText]]) -> list[list[str]]:
    return [[task.rollout_id for task in group] for group in groups]


@given(some_tasks(), st.integers(1, 5), LEAST)
def test_each_is_in_one_group_of_its_kind_and_similar_to_the_first(
    tasks: list[TaskText], size: int, least: float
) -> None:
    groups = form_similar_groups(tasks, size=size, least=least)
    assert sorted(name for group in names(groups) for name in group) == sorted(
        task.rollout_id for task in tasks
    )
    for group in groups:
        assert 1 <= len(group) <= size
        assert {task.kind for task in group} == {group[0].kind}
        assert all(similarity(task.words, group[0].words) >= least for task in group)
        assert group == sorted(group, key=lambda task: (task.finished_at, task.rollout_id))


def test_of_equally_similar_groups_the_oldest_is_joined() -> None:
    words = [frozenset("ab"), frozenset("cd"), frozenset("ac")]  # the last: a third of either's
    tasks = [TaskText(f"r{i}", float(i), "x", each) for i, each in enumerate(words)]
    assert names(form_similar_groups(tasks, size=2, least=0.3)) == [["r0", "r2"], ["r1"]]


@given(some_tasks(), st.integers(1, 5), LEAST)
def test_nobody_stays_alone_who_was_like_an_earlier_group_with_room(
    tasks: list[TaskText], size: int, least: float
) -> None:
    groups = form_similar_groups(tasks, size=size, least=least)
    for number, later in enumerate(groups):
        for group in groups[:number]:
            if group[0].kind != later[0].kind:
                continue
            # When the later one began, the earlier one was full, or unlike it.
            began = (later[0].finished_at, later[0].rollout_id)
            before = sum((task.finished_at, task.rollout_id) < began for task in group)
            assert before == size or similarity(later[0].words, group[0].words) < least


@given(some_tasks(), st.integers(1, 5), LEAST, st.randoms(use_true_random=False), st.data())
def test_neither_order_nor_what_ends_later_changes_a_group(
    tasks: list[TaskText], size: int, least: float, shuffle: st.Random, data: st.DataObject
) -> None:
    groups = names(form_similar_groups(tasks, size=size, least=least))
    mixed = list(tasks)
    shuffle.shuffle(mixed)
    assert names(form_similar_groups(mixed, size=size, least=least)) == groups
    ordered = sorted(tasks, key=lambda task: (task.finished_at, task.rollout_id))
    first = ordered[: data.draw(st.integers(0, len(ordered)))]
    ours = {task.rollout_id for task in first}
    earlier = [[name for name in group if name in ours] for group in groups]
    assert names(form_similar_groups(first, size=size, least=least)) == [
        group for group in earlier if group
    ]


def asked(text: str, system: str = "Be brief.") -> TaskText:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    found = task_text("r", 0.0, messages)
    assert found is not None
    return found


def test_words_count_and_not_how_they_are_written() -> None:
    one = asked("Where is my order, please?").words
    assert one == asked("where IS my  order please").words
    assert similarity(one, asked("Where is my parcel, please?").words) == 4 / 6
    assert similarity(one, asked("Write a poem.").words) == 0
    assert asked("私の注文").words == set("私の注文"), "no spaces: each character is a word"
    assert similarity(asked("!?").words, asked("...").words) == 1, "no words at all"


def test_other_system_prompts_and_held_out_ones_are_of_another_kind() -> None:
    assert asked("hi").kind == asked("bye").kind
    assert asked("hi").kind != asked("hi", system="Be long.").kind
    apart = task_text("r", 0.0, [{"role": "user", "content": "hi"}], kind=["held out"])
    plain = task_text("r", 0.0, [{"role": "user", "content": "hi"}])
    assert apart is not None
    assert plain is not None
    assert apart.kind != plain.kind
    assert task_text("r", 0.0, [{"role": "system", "content": "x"}]) is None
    parts = [{"type": "text", "text": "Where is"}, {"type": "text", "text": "my order?"}]
    found = task_text("r", 0.0, [{"role": "user", "content": parts}])
    assert found is not None
    assert found.words == {"where", "is", "my", "order"}


def test_a_group_has_the_task_of_its_members_and_who_is_left_of_one_is_alone() -> None:
    task_id = similar_task_id(["a", "b"])
    assert task_id == similar_task_id(["b", "a"]) != similar_task_id(["a", "c"])
    other = similar_task_id(["c", "d"])
    waiting = {"a": task_id, "c": other, "d": other, "e": "named", "f": None}
    assert left_alone(waiting) == {"a"}

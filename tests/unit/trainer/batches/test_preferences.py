from __future__ import annotations

import numpy as np
import pytest

from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.row_samples import turn
from tracegrad_trainer.batches import (
    BatchSettings,
    Row,
    TrainingSelection,
    labelled_rows,
    mismatched_rows,
    pack,
    preference_pairs,
    unit_advantages,
)

SETTINGS = BatchSettings(tokens_per_micro_batch=40)


def rollout(name: str, reward: float, *, prompt: int = 1, length: int = 2) -> Rollout:
    return Rollout(name, reward, [turn(name, [prompt, 2], range(10, 10 + length))])


def sides(selection: TrainingSelection) -> list[tuple[int, str, int]]:
    return [(row.pair, row.rollout_id, row.label) for row in selection.rows]


def graded() -> Task:
    rewards = {"a": 0.5, "b": 1.0, "c": 0.0, "d": 0.5}
    return Task("g", [rollout(name, reward) for name, reward in rewards.items()])


def test_the_best_is_held_against_the_worst() -> None:
    made = preference_pairs([graded()], SETTINGS, current_version=1)
    assert sides(made) == [(0, "b", 1), (0, "c", -1)]
    assert made.trained == ["b", "c"]
    assert made.skipped == {"a": "unpaired", "d": "unpaired"}
    assert made.rollouts == ["a", "b", "c", "d"]
    assert made.stats["pairs"] == 1
    assert made.stats["pairs_tied"] == 1
    assert made.stats["skipped_unpaired"] == made.stats["turns_skipped"] == 2
    assert (made.stats["rows"], made.stats["row_tokens"]) == (2, 8)


def test_all_better_against_all_worse_up_to_a_bound() -> None:
    made = preference_pairs([graded()], SETTINGS, current_version=1, choose="all")
    better_worse = [
        (one.rollout_id, other.rollout_id)
        for one, other in zip(made.rows[::2], made.rows[1::2], strict=True)
    ]
    # The largest difference first, then in the order of the rollouts.
    assert better_worse == [("b", "c"), ("b", "a"), ("a", "c"), ("b", "d"), ("d", "c")]
    assert [row.pair for row in made.rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert made.trained == ["b", "c", "a", "d"]
    assert made.skipped == {}
    fewer = preference_pairs([graded()], SETTINGS, current_version=1, choose="all", most=2)
    assert sides(fewer) == sides(made)[:4]


def test_groups_without_a_difference_make_no_pairs() -> None:
    flat = Task("h", [rollout("x", 1.0), rollout("y", 1.0), rollout("z", 1.0)])
    made = preference_pairs([flat, graded()], SETTINGS, current_version=1)
    assert [row.pair for row in made.rows] == [0, 0]
    assert {made.skipped[name] for name in "xyz"} == {"equal_reward"}
    assert made.stats["pairs_tied"] == 3 + 1


def test_of_equal_differences_those_that_begin_alike_are_taken() -> None:
    task = Task(
        "g",
        [rollout("a", 1.0), rollout("b", 0.0, prompt=7), rollout("c", 0.0), rollout("d", 1.0)],
    )
    made = preference_pairs([task], SETTINGS, current_version=1)
    assert sides(made) == [(0, "a", 1), (0, "c", -1)]
    assert made.stats["pairs_other_prompt"] == 0
    other = Task("g", [rollout("a", 1.0), rollout("b", 0.0, prompt=7)])
    assert preference_pairs([other], SETTINGS, current_version=1).stats["pairs_other_prompt"] == 1


def test_a_rollout_that_forks_is_one_side_with_all_its_rows() -> None:
    a = turn("a1", [1, 2], [3])
    forked = Rollout("a", 1.0, [a, turn("a2", [4], [5], parent=a), turn("a3", [6], [7], parent=a)])
    task = Task("g", [forked, rollout("b", 0.0)])
    made = preference_pairs([task], SETTINGS, current_version=1)
    assert sides(made) == [(0, "a", 1), (0, "a", 1), (0, "b", -1)]
    tree = SETTINGS.model_copy(update={"shared_prefix": "tree"})
    assert sides(preference_pairs([task], tree, current_version=1)) == [(0, "a", 1), (0, "b", -1)]
    ((batch,),) = pack(made.rows, ranks=1, budget=40)
    assert sorted(batch.label.tolist()) == [-1, 1, 1]


def test_pairs_that_do_not_fit_make_room_for_others_and_are_counted() -> None:
    task = Task("g", [rollout("a", 1.0, length=30), rollout("b", 0.5), rollout("c", 0.0, length=8)])
    made = preference_pairs([task], SETTINGS, current_version=1)
    # a and c together have 42 tokens.
    assert sides(made) == [(0, "a", 1), (0, "b", -1)]
    assert made.skipped == {"c": "over_long"}
    assert made.stats["pairs_over_long"] == 1
    pack(made.rows, ranks=1, budget=SETTINGS.tokens_per_micro_batch)


def test_turns_that_a_filter_takes_are_not_compared() -> None:
    task = graded()
    task.rollouts[1].turns[0] = turn("b", [1, 2], [3], sampling={"temperature": 0})
    made = preference_pairs([task], SETTINGS, current_version=1)
    assert sides(made) == [(0, "a", 1), (0, "c", -1)]
    assert made.skipped == {"b": "greedy", "d": "unpaired"}


def test_kto_labels_by_the_groups_mean_or_by_a_threshold() -> None:
    task = Task("g", [rollout("a", 0.2), rollout("b", 1.0), rollout("c", 0.0)])
    flat = Task("h", [rollout("x", 1.0), rollout("y", 1.0)])
    made = labelled_rows([task, flat], SETTINGS, current_version=1)
    assert sides(made) == [(-1, "a", -1), (-1, "b", 1), (-1, "c", -1)]
    assert made.skipped == {"x": "equal_reward", "y": "equal_reward"}
    assert (made.stats["chosen"], made.stats["rejected"]) == (1, 2)
    # Above, not at the threshold.
    made = labelled_rows([task, flat], SETTINGS, current_version=1, threshold=0.2)
    assert [row.label for row in made.rows] == [-1, 1, -1, 1, 1]
    assert made.skipped == {}


def test_what_a_filter_takes_still_counts_in_the_mean_of_labels() -> None:
    task = Task("g", [rollout("a", 0.6), rollout("b", 1.0), rollout("c", 0.5)])
    task.rollouts[1].turns[0] = turn("b", [1, 2], [3], sampling={"temperature": 0})
    made = labelled_rows([task], SETTINGS, current_version=1)
    assert sides(made) == [(-1, "a", -1), (-1, "c", -1)]


def test_mismatched_rows_answer_another_groups_prompt() -> None:
    tasks = [
        Task(f"g{g}", [rollout(f"{g}{r}", float(r), prompt=g, length=g + 2) for r in range(2)])
        for g in range(3)
    ]
    labelled = labelled_rows(tasks, SETTINGS, current_version=1).rows
    made = mismatched_rows(labelled, limit=40)
    assert [row.rollout_id for row in made] == ["10", "11", "20", "21", "00", "01"]
    first: Row = made[0]
    assert first.input_ids.tolist() == [0, 2, 10, 11, 12]
    assert first.keep.tolist() == first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.rollout_logprobs[2:].tolist() == labelled[2].rollout_logprobs[2:].tolist()
    assert (first.turn_index.tolist(), first.kept_turn_ids) == ([-1, -1, 0, 0, 0], ["10"])
    assert [row.input_ids[0] for row in made] == [0, 0, 1, 1, 2, 2]
    assert [len(row) for row in mismatched_rows(labelled, limit=5)] == [5, 5, 4, 4]


def test_mismatched_rows_meet_another_group_in_whatever_order_they_come() -> None:
    tasks = [
        Task(f"g{g}", [rollout(f"{g}{r}", float(r), prompt=g) for r in range(2)]) for g in range(2)
    ]
    first, second, third, fourth = labelled_rows(tasks, SETTINGS, current_version=1).rows
    # As `trainer sft` shuffles them: two rows further is the same group.
    made = mismatched_rows([first, third, second, fourth], limit=40)
    assert sorted(row.rollout_id for row in made) == ["00", "01", "10", "11"]
    assert all(row.group_id != f"g{row.input_ids[0]}" for row in made)


def test_mismatched_rows_of_several_turns_keep_what_came_in_between() -> None:
    a = turn("a1", [1, 2, 3], [4])
    long = Rollout("a", 1.0, [a, turn("a2", [5, 6], [7, 8], parent=a)])
    rows = labelled_rows([Task("g", [long]), Task("h", [rollout("b", 0.0)])],
                     SETTINGS, current_version=1, threshold=0.5).rows  # fmt: skip
    second_prompt_first_completion = mismatched_rows(rows, limit=40)[1]
    assert second_prompt_first_completion.input_ids.tolist() == [1, 2, 4, 5, 6, 7, 8]
    assert np.flatnonzero(second_prompt_first_completion.keep).tolist() == [2, 5, 6]


def test_of_a_mismatched_prompt_nothing_is_a_sample() -> None:
    cold = turn("a1", [1, 2, 3], [4], sampling={"temperature": 0})
    mine = Rollout("a", 1.0, [cold, turn("a2", [5], [7], parent=cold)])
    rows = labelled_rows([Task("g", [mine]), Task("h", [rollout("b", 0.0)])],
                     SETTINGS, current_version=1, threshold=0.5).rows  # fmt: skip
    assert rows[0].loss_mask.tolist() == [False] * 3 + [True, False, True]
    made = mismatched_rows(rows, limit=40)[0]
    assert made.input_ids.tolist() == [1, 2, 3, 4, 5, 10, 11]
    assert made.loss_mask.tolist() == made.keep.tolist() == [False] * 5 + [True] * 2
    assert made.turn_index.tolist() == [-1] * 5 + [0] * 2
    assert made.policy_version.tolist() == [-1] * 5 + [1] * 2
    assert made.temperature.tolist() == [1] * 7
    assert not made.rollout_logprobs[:5].any()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_row_is_never_its_own_mismatch(count: int) -> None:
    task = Task("g", [rollout(f"r{i}", 0.0, prompt=i) for i in range(count)])
    rows = selected([task] if count else []).rows
    made = mismatched_rows(rows, limit=40)
    assert len(made) == (count if count > 1 else 0)
    for row in made:
        assert row.rollout_id != f"r{row.input_ids[0]}"


def test_trees_have_no_mismatch() -> None:
    a = turn("a", [1], [2])
    forked = Rollout("r", 1.0, [a, turn("b", [4], [5], parent=a), turn("c", [6], [7], parent=a)])
    rows = selected([Task("g", [forked])], shared_prefix="tree").rows
    with pytest.raises(ValueError, match="shared_prefix = 'paths'"):
        mismatched_rows([*rows, *rows], limit=40)
    assert len(labelled_rows([Task("g", [forked])], BatchSettings(shared_prefix="tree"),
                         current_version=1, threshold=0.5).rows) == 2  # fmt: skip


def test_what_is_imitated_has_advantage_one() -> None:
    chosen = selected([graded()], advantages=unit_advantages)
    assert all((row.advantage[row.keep] == 1).all() for row in chosen.rows)
    assert len(chosen.rows) == 4

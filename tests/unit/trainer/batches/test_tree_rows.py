from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.batch_samples import Rollout, Task, selected, source_of, trees
from support.trainer.row_samples import turn
from tracegrad.events import Turn
from tracegrad_trainer.batches import Row, micro_batch, rows_of
from tracegrad_trainer.batches.rows import path_rows
from tracegrad_trainer.batches.tree_rows import tree_rows


def as_trees(turns: list[Turn], skipped: set[str] | None = None, limit: int = 10**6) -> list[Row]:
    source = source_of(Rollout("r", 0.5, turns), skipped=skipped or ())
    return tree_rows(source, limit=limit)[0]


def history(row: Row, token: int) -> list[int]:
    """Places from the first token to this one, as `previous` leads back."""
    found = [token]
    while (before := int(row.predecessors[found[-1]])) >= 0:
        found.append(before)
    return found[::-1]


def ends_of(row: Row) -> list[int]:
    return [len(row)] * len(row) if row.subtree_end is None else row.subtree_end.tolist()


def test_two_samples_of_one_prompt_share_it() -> None:
    a = turn("a", [1, 2], [3, 4])
    b = turn("b", [5, 6], [7, 8], parent=a)
    c = turn("c", [5, 6], [7, 9], parent=a)
    (row,) = as_trees([a, b, c])
    # Both replies begin with 7: each has its own, for each is a target.
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 7, 9]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7]
    assert row.predecessors.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 5, 8]
    assert ends_of(row) == [10] * 6 + [8, 8] + [10, 10]
    assert row.turn_ids == ("a", "b", "c")
    assert row.turn_index.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, 2, 2]
    assert row.loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 4
    assert (row.score, row.reward.any()) == (0.5, False)


def test_a_rewritten_history_shares_what_it_left_as_it_was() -> None:
    a = turn("a", [1, 2, 3, 4], [5])
    other = turn("b", [1, 2, 3, 9], [6])
    (row,) = as_trees([a, other])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 9, 6]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert row.predecessors.tolist() == [-1, 0, 1, 2, 3, 2, 5]
    assert ends_of(row) == [7, 7, 7, 5, 5, 7, 7]


def test_a_completion_that_histories_leave_in_two_places_keeps_its_numbers_in_order() -> None:
    a = turn("a", [1, 2], [3, 4, 5, 6, 7, 8])
    first = turn("b", [1, 2, 3, 4, 9, 9, 9], [9, 9])
    second = turn("c", [1, 2, 3, 4, 5, 6, 9, 9], [9])
    (row,) = as_trees([a, first, second])
    places = np.flatnonzero(row.turn_index == row.turn_ids.index("a"))
    assert row.input_ids[places].tolist() == a.completion_token_ids.tolist()
    assert row.rollout_logprobs[places].tolist() == a.completion_logprobs.tolist()


def test_prompts_are_shared_as_far_as_they_are_alike_however_often_they_fork() -> None:
    a = turn("a", [1, 2], [3])
    turns = [
        turn("b", [5, 6, 7], [10], parent=a),
        turn("c", [5, 6, 8], [10], parent=a),
        turn("d", [5, 6, 8, 9], [10], parent=a),
        turn("e", [5, 6, 8, 9, 4], [10], parent=a),
    ]
    (row,) = as_trees([a, *turns])
    # 1 2 3 | 5 6 | 7 | 8 | 9 | 4, and five replies of one token, of which 3 is one.
    assert sorted(row.input_ids.tolist()) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]


def test_the_longest_of_branches_that_begin_alike_is_found() -> None:
    samples = [turn("x", [1], [2]), turn("y", [1], [2])]  # twice the same reply
    # Their histories are known only by their tokens, as after a restart.
    later = [turn("z", [1, 2, 3], [7]), turn("w", [1, 2, 3, 4], [8])]
    (row,) = as_trees([*samples, *later])
    assert sorted(row.input_ids.tolist()) == [1, 2, 2, 3, 4, 7, 8]
    of_second = turn("v", [3], [5], parent=samples[1])
    (row,) = as_trees([*samples, of_second, later[1]])
    assert sorted(row.input_ids.tolist()) == [1, 2, 2, 3, 4, 5, 8]


def test_without_a_fork_or_a_common_beginning_rows_are_plain() -> None:
    a = turn("a", [1, 2], [3])
    b = turn("b", [4], [5], parent=a)
    other = turn("c", [7, 2], [3])
    rows = as_trees([a, b, other])
    assert [row.turn_ids for row in rows] == [("a", "b"), ("c",)]
    assert all(row.subtree_end is row.position is row.previous is None for row in rows)


def test_a_turn_that_is_skipped_is_context_of_its_branch() -> None:
    a = turn("a", [1], [2])
    b = turn("b", [3], [4], parent=a)
    c = turn("c", [5], [6], parent=a)
    d = turn("d", [3], [9], parent=a)
    (row,) = as_trees([a, b, c, d], {"a", "d"})
    assert row.kept_turn_ids == ["b", "c"]
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask.tolist() == [False, True, False, True, False, True]
    assert row.keep.tolist() == [False, False, False, True, False, True]
    assert row.advantage.tolist() == [0, 0, 0, 1, 0, 1]


def test_a_tree_longer_than_a_row_becomes_paths_and_is_counted() -> None:
    a = turn("a", [1, 2, 3], [4])
    b = turn("b", [5], [6], parent=a)
    c = turn("c", [7], [8], parent=a)
    group = Task("g", [Rollout("r", 1.0, [a, b, c])])
    whole = selected([group], shared_prefix="tree", tokens_per_micro_batch=8)
    assert [len(row) for row in whole.rows] == [8]
    assert [whole.stats[name] for name in ("rows_tree", "trees_too_long")] == [1, 0]
    assert [whole.stats[name] for name in ("paths", "forks", "tokens_saved")] == [2, 1, 4]
    cut = selected([group], shared_prefix="tree", tokens_per_micro_batch=7)
    assert [len(row) for row in cut.rows] == [6, 6]
    assert [cut.stats[name] for name in ("rows_tree", "trees_too_long")] == [0, 1]
    assert cut.stats["tokens_saved"] == 0
    assert cut.trained == whole.trained == ["a", "b", "c"]


def test_conversations_of_a_thousand_turns_are_no_deeper_than_the_interpreter() -> None:
    turns = [turn("t0", [1], [2])]
    for i in range(1, 1200):
        turns.append(turn(f"t{i}", [1], [2], parent=turns[-1]))
    turns.append(turn("fork", [3], [4], parent=turns[-2]))
    (row,) = as_trees(turns)
    assert len(row) == 2 * 1200 + 2


@pytest.mark.parametrize("vocabulary", [2, 10])  # branches that begin alike, and those that part
@pytest.mark.parametrize("shared", ["paths", "tree"])
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_trained_token_is_one_target_behind_its_own_prompt(
    shared: str, vocabulary: int, data: st.DataObject
) -> None:
    turns = data.draw(trees(vocabulary=vocabulary))
    skipped = {t.turn_id for t in turns if data.draw(st.booleans())}
    source = source_of(Rollout("r", 0.5, turns), skipped=skipped)
    rows = tree_rows(source, limit=10**6)[0] if shared == "tree" else path_rows(source)
    seen: dict[str, int] = {}
    for row in rows:
        assert row.keep[-1]
        assert (row.loss_mask == (row.turn_index >= 0)).all()
        for number, turn_id in enumerate(row.turn_ids):
            (one,) = (t for t in turns if t.turn_id == turn_id)
            places = np.flatnonzero(row.turn_index == number)
            seen[turn_id] = seen.get(turn_id, 0) + len(places)
            # The turn's whole history is found from its last token, and holds all its targets.
            back = history(row, int(places[-1]))
            tokens = one.prompt_token_ids + one.completion_token_ids
            assert row.input_ids[back].tolist() == tokens.tolist()
            assert row.positions[back].tolist() == list(range(len(tokens)))
            assert back[len(one.prompt_token_ids) :] == places.tolist()
            assert row.rollout_logprobs[places].tolist() == one.completion_logprobs.tolist()
            assert row.keep[places].tolist() == [turn_id not in skipped] * len(places)
    # Context that was sampled is in one row too, like what is trained.
    assert seen == {t.turn_id: len(t.completion_token_ids) for t in turns if t.turn_id in seen}
    trained = [t.turn_id for t in turns if t.turn_id not in skipped]
    assert sorted(t for row in rows for t in row.kept_turn_ids) == sorted(trained)


@settings(max_examples=200, deadline=None)
@given(trees())
def test_a_token_is_seen_by_what_comes_of_it_and_by_nothing_else(turns: list[Turn]) -> None:
    for row in as_trees(turns):
        ends = np.array(ends_of(row))
        t = np.arange(len(row))
        sees = (t[None, :] <= t[:, None]) & (t[:, None] < ends[None, :])  # [i, j]: i attends to j
        ancestors = np.zeros_like(sees)
        for i in range(len(row)):
            ancestors[i, history(row, i)] = True
        assert (sees == ancestors).all()
        assert (row.predecessors < t).all()


@settings(max_examples=100, deadline=None)
@given(trees(), st.data())
def test_trees_and_paths_say_the_same_of_every_target(
    turns: list[Turn], data: st.DataObject
) -> None:
    skipped = {t.turn_id for t in turns if data.draw(st.booleans())}
    rollout = Rollout("r", 0.5, turns, turn_rewards={0: 2.0, len(turns) - 1: -1.0})
    values = [float(i + 1) for i in range(len(turns))]
    source = source_of(rollout, "g", values, skipped)

    def targets(rows: list[Row]) -> list[tuple[object, ...]]:
        return sorted(
            (
                row.turn_ids[row.turn_index[t]],
                row.input_ids[history(row, t)].tolist(),
                *(getattr(row, name)[t].item() for name in ("advantage", "reward", "temperature")),
                *(row.rollout_logprobs[t].item(), row.policy_version[t].item()),
            )
            for row in rows
            for t in np.flatnonzero(row.keep).tolist()
        )

    shared, _ = tree_rows(source, limit=10**6)
    apart = rows_of(rollout, group_id="g", advantages=values, skipped=skipped)
    assert targets(shared) == targets(apart)
    assert sum(map(len, shared)) <= sum(map(len, apart))


@settings(max_examples=50, deadline=None)
@given(trees(), trees())
def test_in_a_micro_batch_trees_and_paths_keep_to_themselves(
    first: list[Turn], second: list[Turn]
) -> None:
    rows = [*as_trees(first), *as_trees(second)]
    batch = micro_batch(rows, range(len(rows)))
    starts = np.cumsum(batch.row_lengths) - batch.row_lengths
    stops = starts + batch.row_lengths
    assert ((starts[batch.row] <= batch.source) & (batch.target < stops[batch.row])).all()
    sources = [s + r.predecessors[r.keep] for s, r in zip(starts, rows, strict=True)]
    assert batch.source.tolist() == np.concatenate(sources).tolist()
    forked = [row for row in rows if row.subtree_end is not None]
    if not forked:
        assert batch.subtree_end is None
        return
    assert batch.subtree_end is not None
    ends = np.concatenate([s + np.array(ends_of(r)) for s, r in zip(starts, rows, strict=True)])
    assert batch.subtree_end.tolist() == ends.tolist()
    left, _ = batch.without_rows([0])
    if len(rows) > 1 and left.subtree_end is not None:
        expected = ends[len(rows[0]) :] - len(rows[0])
        assert left.subtree_end.tolist() == expected.tolist()


def test_of_a_parent_without_a_prompt_nothing_is_a_target() -> None:
    a = turn("a", [], [1, 2], untrainable="no_prompt")
    b = turn("b", [3], [4], parent=a)
    c = turn("c", [5], [6], parent=a)
    for shared in ("paths", "tree"):
        chosen = selected([Task("g", [Rollout("r", 1.0, [a, b, c])])], shared_prefix=shared)
        assert chosen.skipped == {"a": "no_prompt"}
        assert sorted(chosen.trained) == ["b", "c"]
        assert sum(int(row.loss_mask.sum()) for row in chosen.rows) == 2


@pytest.mark.parametrize("shared", ["paths", "tree"])
def test_an_empty_turn_is_nobodys_history(shared: str) -> None:
    empty = turn("e", [], [])
    b = turn("b", [3], [4], parent_id="e")
    c = turn("c", [3], [6], parent_id="e")
    chosen = selected([Task("g", [Rollout("r", 1.0, [empty, b, c])])], shared_prefix=shared)
    assert chosen.skipped == {"e": "no_tokens"}
    assert chosen.trained == ["b", "c"]

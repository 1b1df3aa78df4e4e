"""The serving engine's routes, from turns to the tokens of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.batch_samples import Rollout, Task, source_of, trees
from support.trainer.routing_samples import LAYOUT, by_expert, drawn, length, npy, told
from support.trainer.row_samples import turn
from tracegrad.events import Turn
from tracegrad_trainer.batches import (
    BatchSettings,
    RoutingLayout,
    Row,
    TrainingSelection,
    micro_batch,
    rows_of,
    select,
    unit_advantages,
)
from tracegrad_trainer.batches.expert_routing import UNROUTED, ExpertRouting
from tracegrad_trainer.batches.tree_rows import tree_rows

SETTINGS = BatchSettings(drop_equal_reward=False, max_staleness=None)


def rows(turns: list[Turn], skipped: set[str] | None = None) -> list[Row]:
    rollout = Rollout("r", 1.0, turns)
    values = [1.0] * len(turns)
    return rows_of(
        rollout, group_id="g", advantages=values, skipped=skipped or set(), layout=LAYOUT
    )


def one_tree(turns: list[Turn]) -> Row:
    source = source_of(Rollout("r", 1.0, turns), layout=LAYOUT)
    ((row,), _) = tree_rows(source, limit=10**6)
    return row


def routes_of(row: Row) -> ExpertRouting:
    assert row.expert_routing is not None
    return row.expert_routing


def first_choice(row: Row) -> list[int]:
    """The first expert of the first router for each token; -1: not known."""
    choice: list[int] = routes_of(row)[:, 0, 0].tolist()
    return choice


def selected(
    turns: list[Turn], layout: RoutingLayout | None = LAYOUT, **changes: Any
) -> TrainingSelection:
    return select(
        [Task("g", [Rollout("r", 1.0, turns)])],
        SETTINGS.model_copy(update=changes),
        advantages=unit_advantages,
        current_version=1,
        routing=layout,
    )


def chain() -> tuple[Turn, Turn, Turn]:
    a = turn("a", [1, 2, 3], [4, 5])
    b = turn("b", [6], [7, 8, 9], parent=a)
    return a, b, turn("c", [10, 11], [12], parent=b)


# Paths


def test_a_path_puts_together_what_each_turn_adds() -> None:
    a, b, c = chain()
    whole = drawn(length(c))
    # As the engine is asked: from the last token of the turn before, which nobody forwarded.
    (row,) = rows([told(a, whole), told(b, whole, start=4), told(c, whole, start=8)])
    assert np.array_equal(routes_of(row)[:-1], whole[:-1, [1, 2]])
    assert (routes_of(row)[-1] == UNROUTED).all()
    assert routes_of(row).dtype == np.int8


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_keep_their_numbers_whatever_they_are_written_as(dtype: Any) -> None:
    many = RoutingLayout(layers=2, routed=(0, 1), experts=256, k=4)
    (a, _, _), found = chain(), drawn(5, layout=RoutingLayout(2, (0, 1), 256, 4))
    found[0, 0] = [255, 128, 127, 0]
    rollout = Rollout("r", 1.0, [told(a, found, dtype=dtype)])
    (row,) = rows_of(rollout, group_id="g", advantages=[1.0], layout=many)
    assert np.array_equal(routes_of(row)[:-1], found[:-1])


def test_of_what_two_turns_say_the_first_is_believed() -> None:
    a, b, c = chain()
    (row,) = rows([by_expert(a, 1), by_expert(b, 2), by_expert(c, 3, start=8)])
    assert first_choice(row) == [1] * 4 + [2] * 4 + [3] * 3 + [UNROUTED]


def test_a_turn_without_routes_leaves_its_tokens_to_those_that_continue_it() -> None:
    a, b, c = chain()
    (row,) = rows([a, by_expert(b, 2), c])
    assert first_choice(row) == [2] * 8 + [UNROUTED] * 4
    (row,) = rows([by_expert(a, 1), b, by_expert(c, 3, start=8)])
    assert first_choice(row) == [1] * 4 + [UNROUTED] * 4 + [3] * 3 + [UNROUTED]


def test_context_that_is_not_trained_keeps_its_routes() -> None:
    a, b, c = chain()
    turns = [by_expert(a, 1), by_expert(b, 2, start=4), by_expert(c, 3, start=8)]
    (row,) = rows(turns, skipped={"a"})
    assert row.turn_ids == ("a", "b", "c")
    assert first_choice(row) == [1] * 4 + [2] * 4 + [3] * 3 + [UNROUTED]


def test_a_branch_has_the_routes_of_the_trunk_that_another_row_owns() -> None:
    a, b, _ = chain()
    other = turn("d", [6], [7, 1], parent=a)
    turns = [by_expert(a, 1), by_expert(b, 2, start=4), by_expert(other, 3, start=4)]
    first, second = rows(turns)
    assert first_choice(first) == [1] * 4 + [2] * 4 + [UNROUTED]
    assert second.loss_mask[:5].sum() == 0
    assert first_choice(second) == [1] * 4 + [3] * 3 + [UNROUTED]


def test_a_row_that_is_cut_ends_with_what_is_known_before_the_cut() -> None:
    a, b, c = chain()
    turns = [by_expert(a, 1), by_expert(b, 2, start=4), by_expert(c, 3, start=8)]
    chosen = selected(turns, max_row_tokens=10)
    assert chosen.skipped == {"c": "over_long"}
    [row] = chosen.rows
    assert first_choice(row) == [1] * 4 + [2] * 4 + [UNROUTED]


def test_an_experts_turn_gets_routes_from_the_policys_turn_behind_it() -> None:
    a = turn("a", [1, 2, 3], [4, 5], sampling={"source": "expert"})
    b = turn("b", [6], [7, 8], parent=a)
    (row,) = rows([a, by_expert(b, 2)])
    assert row.demonstration[3:5].all()
    assert first_choice(row) == [2] * 7 + [UNROUTED]


def test_rows_of_which_nothing_is_known_have_no_routes() -> None:
    assert rows(list(chain()))[0].expert_routing is None
    (known,) = rows([by_expert(chain()[0], 1)])
    made = micro_batch([*rows(list(chain())), known], [0, 1])
    assert made.expert_routing is not None
    assert (made.expert_routing[:12] == UNROUTED).all()
    assert made.expert_routing[12:, 0, 0].tolist() == [1] * 4 + [UNROUTED]
    assert made.expert_routing.dtype == np.int8


# Trees


@pytest.mark.parametrize("start", [0, 3])
def test_a_trees_branches_have_their_own_routes_behind_those_of_the_trunk(start: int) -> None:
    a = turn("a", [1, 2], [3, 4])
    b = turn("b", [5, 6], [7, 8], parent=a)
    c = turn("c", [5, 6], [7, 9], parent=a)
    row = one_tree([by_expert(a, 1), by_expert(b, 2, start=start), by_expert(c, 3, start=start)])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 7, 9]
    assert first_choice(row) == [1] * 3 + [2] * 4 + [UNROUTED] + [3, UNROUTED]


def test_what_only_one_branch_knows_of_the_trunk_all_have() -> None:
    a = turn("a", [1, 2], [3, 4])
    b = turn("b", [5, 6], [7, 8], parent=a)
    c = turn("c", [5, 6], [7, 9], parent=a)
    row = one_tree([a, b, by_expert(c, 3)])
    assert first_choice(row) == [3] * 6 + [UNROUTED] * 2 + [3, UNROUTED]


def test_a_turn_that_sampled_nothing_still_tells_of_its_prompt() -> None:
    a = turn("a", [1, 2, 3], [])
    b = turn("b", [5, 6], [7], parent=a)
    c = turn("c", [8, 6], [7], parent=a)
    row = one_tree([by_expert(a, 1), by_expert(b, 2, start=2), by_expert(c, 3, start=2)])
    assert row.input_ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 6, 7]
    assert first_choice(row) == [1, 1] + [2] * 3 + [UNROUTED] + [3, 3, UNROUTED]


@settings(max_examples=100, deadline=None)
@given(trees(), st.data())
def test_trees_know_at_least_what_paths_know(turns: list[Turn], data: st.DataObject) -> None:
    """Where the engine's choice depends on the tokens so far alone, both say the same."""

    def choice(tokens: list[int]) -> int:
        return sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % 5

    def with_routes(one: Turn) -> Turn:
        start = data.draw(st.sampled_from([None, *range(length(one) - 1)]))
        if start is None:
            return one
        ids = (one.prompt_token_ids + one.completion_token_ids).tolist()
        first = [choice(ids[: i + 1]) for i in range(len(ids))]
        return told(one, np.array([[[e, e + 1]] * 3 for e in first]), start=start)

    rollout = Rollout("r", 1.0, [with_routes(one) for one in turns])
    source = source_of(rollout, layout=LAYOUT)

    def known(made: list[Row]) -> dict[tuple[str, int], list[int]]:
        """By sampled token: of all that it sees, the experts."""
        found = {}
        for row in made:
            routes = (
                np.full(len(row), UNROUTED)
                if row.expert_routing is None
                else row.expert_routing[:, 0, 0]
            )
            for t in np.flatnonzero(row.loss_mask).tolist():
                turn_id = row.turn_ids[row.turn_index[t]]
                place = int(row.positions[t])
                seen = [t]
                while (before := int(row.predecessors[seen[-1]])) >= 0:
                    seen.append(before)
                for at in seen:
                    expected = choice(row.input_ids[seen[seen.index(at) :]][::-1].tolist())
                    assert routes[at] in (UNROUTED, expected)
                found[turn_id, place] = routes[seen].tolist()
        return found

    shared, apart = known(tree_rows(source, limit=10**6)[0]), known(rows(list(rollout.turns)))
    assert shared.keys() == apart.keys()
    for target, experts in apart.items():
        pairs = zip(shared[target], experts, strict=True)
        assert all(mine == theirs or theirs == UNROUTED for mine, theirs in pairs)


# Selection


@pytest.mark.parametrize("shape", ["paths", "tree"])
def test_a_selection_says_of_how_many_tokens_the_routes_are_known(shape: str) -> None:
    a, b, c = chain()
    turns = [by_expert(a, 1), b, by_expert(c, 3, start=8)]
    chosen = selected(turns, shared_prefix=shape)
    assert chosen.stats["expert_routing_known_share"] == 7 / 12
    assert selected([a, b, c], shared_prefix=shape).stats["expert_routing_known_share"] == 0
    assert selected([], shared_prefix=shape).stats["expert_routing_known_share"] == 0


def test_without_routing_replay_nothing_reads_the_routes() -> None:
    a, _, _ = chain()
    chosen = selected([replace(a, routed_experts=b"no file")], layout=None)
    assert "expert_routing_known_share" not in chosen.stats
    assert chosen.rows[0].expert_routing is None


def test_of_turns_that_are_in_no_row_the_routes_are_not_read() -> None:
    a, _, _ = chain()
    alone = turn("z", [9], [8], untrainable="greedy", routed_experts=b"no file")
    assert selected([by_expert(a, 1), alone]).trained == ["a"]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"no numpy file", "it is no .npy file"),
        (npy(drawn(4))[:-1], "it was cut"),
        (npy(np.zeros((4, 3))), "it is no .npy file"),
        (npy(drawn(4), np.float32), "it is no .npy file"),
        (npy(drawn(5)), "5 tokens of a turn of 5"),
        (npy(drawn(4)[:, :2]), "another model's, of 2 layers and 2 experts a token: this one.*3"),
        (npy(drawn(4)[..., :1]), "another model's, of 3 layers and 1 experts a token"),
        (npy(drawn(4) + 1), "they name experts 1 to 6, this one has 6 a layer"),
        (npy(drawn(4) - 1, np.int32), "they name experts -1 to"),
    ],
)
@pytest.mark.parametrize("shape", ["paths", "tree"])
def test_routes_of_another_model_end_the_step_before_it_begins(
    file: bytes, reason: str, shape: str
) -> None:
    a = replace(chain()[0], routed_experts=file)
    fork = turn("f", [1], [2])
    with pytest.raises(ValueError, match=rf"routed experts of turn a: .*{reason}.*fsdp\.routing"):
        selected([a, fork], shared_prefix=shape)

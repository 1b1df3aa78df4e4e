"""`TurnTree` against each of its parts computed by itself, on random forests."""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.batch_samples import trees
from support.trainer.row_samples import turn
from tracegrad.events import Turn
from tracegrad.turn_tree import TokenDigests, TurnTree, paths


def path_to(turn: Turn, turns: list[Turn]) -> list[Turn]:
    """From the root, one parent after the other."""
    above = [one for one in turns if one.turn_id == turn.parent_id]
    return [*path_to(above[0], turns), turn] if above else [turn]


def naive_paths(turns: list[Turn]) -> list[list[Turn]]:
    leaves = [one for one in turns if all(other.parent_id != one.turn_id for other in turns)]
    return [path_to(leaf, turns) for leaf in leaves]


def digest(*parts: array[int]) -> bytes:
    return blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest()


@settings(max_examples=300, deadline=None)
@given(trees(), st.data())
def test_a_tree_is_what_its_turns_say(turns: list[Turn], data: st.DataObject) -> None:
    tree = TurnTree.of(turns)
    assert list(tree.turns) == turns
    assert [turns[tree.places[one.turn_id]] for one in turns] == turns
    for place, one in enumerate(turns):
        above = [tree.turns[at] for at in tree.ancestors(place)]
        assert [*above[::-1], one] == path_to(one, turns)
        assert tree.parents[place] == (turns.index(above[0]) if above else -1)
    assert list(map(list, tree.paths())) == naive_paths(turns)
    assert [turns[leaf] for leaf in tree.leaves] == [path[-1] for path in naive_paths(turns)]
    assert list(paths(turns)) == list(tree.paths())
    assert list(tree.digests) == [
        TokenDigests(
            digest(one.prompt_token_ids), digest(one.prompt_token_ids, one.completion_token_ids)
        )
        for one in turns
    ]

    skipped = {one.turn_id for one in turns if data.draw(st.booleans())}
    left = [one for one in turns if one.turn_id not in skipped]
    needed = [one for one in turns if any(one in path_to(other, turns) for other in left)]
    kept = tree.without(skipped)
    assert list(kept.turns) == needed
    assert list(map(list, kept.paths())) == naive_paths(needed)
    assert all(path[-1].turn_id not in skipped for path in kept.paths())


def test_a_tree_of_nothing_has_no_path() -> None:
    tree = TurnTree[Turn].of([])
    assert list(tree.paths()) == []
    assert (tree.leaves, tree.digests, tree.without(["a"]).turns) == ((), (), ())


def test_a_turn_that_continues_itself_is_refused() -> None:
    a, b = turn("a", [1], [2], parent_id="b"), turn("b", [1], [2], parent_id="a")
    leaf = turn("c", [1], [2], parent_id="b")
    with pytest.raises(AssertionError, match="its own ancestor"):
        list(TurnTree.of([a, b, leaf]).paths())
    assert len(TurnTree.of([a, b, leaf]).without(()).turns) == 3


def digests(turns: list[Turn]) -> list[TokenDigests]:
    return list(TurnTree.of(turns).digests)


def test_equal_tokens_have_equal_digests_however_they_were_chained() -> None:
    a = turn("a", [1, 2, 3], [4, 5])
    b = turn("b", [6, 7], [8], parent=a)
    alone = replace(b, parent_id=None)
    early = digests([b, a])[0]
    assert digests([a, b])[1] == digests([alone])[0] == early
    sibling = turn("c", [6, 7], [8], parent=a)
    assert digests([a, b, sibling])[2] == early
    shorter = replace(b, prompt_token_ids=b.prompt_token_ids[:-1], parent_id=None)
    longer = replace(
        shorter,
        completion_token_ids=array("i", [7, 8]),
        completion_logprobs=array("f", [0, 0]),
        policy_versions=((1, 2),),
    )
    assert digests([longer])[0].whole == early.whole
    assert digests([longer])[0] != early

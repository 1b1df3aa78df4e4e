"""Anchors of tasks in a store: which demonstration, what is next, and that nothing counts twice."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import update

from support.store.events import chain, rollout_events
from support.store.maintenance import remove
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Store
from tracegrad.store.anchors.anchor_store import AnchorStore, RolloutFromAnchor
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad.store.models import TaskAnchors
from tracegrad.turn_tree import extends

pytestmark = pytest.mark.databases("sqlite")  # the state is one JSON column


def turns_of(rollout_id: str, count: int, *, parent: Turn | None = None) -> list[Turn]:
    """A conversation, or how it goes on behind `parent`."""
    return chain(
        rollout_id,
        count,
        behind=parent,
        new=lambda index: [index + 1],
        sampled=lambda index: [100 + index, 7],
        version=3,
        request=lambda index: {"messages": [{"role": "user", "content": f"ask {index}"}]},
        response=lambda index: {"text": f"answer {index}"},
    )


def ended(
    rollout_id: str, reward: float | None, outcome: Outcome = Outcome.COMPLETED, at: float = 0
) -> list[Event]:
    now = time.time() + at - 1
    return rollout_events(rollout_id, turns=0, reward=reward, outcome=outcome, at=now)[1:]


def add_demonstration(
    store: Store,
    rollout_id: str = "e",
    turns: int = 3,
    reward: float = 1.0,
    *,
    held_out: bool = False,
) -> None:
    opened = RolloutStarted(rollout_id=rollout_id, task_id="t", held_out=held_out)
    store.append([opened, *turns_of(rollout_id, turns), *ended(rollout_id, reward)])


def anchors(store: Store, **settings: Any) -> AnchorStore:
    defaults = {"window": 2, "threshold": 1.0, "group_size": 2, "groups": 1}
    return AnchorStore(store, AnchorSettings(**(defaults | settings)))


def end(store: Store, found: RolloutFromAnchor, reward: float | None, **how: Any) -> None:
    """The policy takes a turn from the anchor and is done."""
    parent = found.turns[found.anchor - 1] if found.anchor else None
    store.append(
        [*turns_of(found.rollout_id, 1, parent=parent), *ended(found.rollout_id, reward, **how)]
    )


def test_without_a_demonstration_a_task_is_sampled_from_its_beginning(store: Store) -> None:
    mine = anchors(store)
    [found] = mine.next("t", tags={"split": "train"}, agent="a")
    assert (found.task_id, found.anchor, found.demonstration, found.turns) == ("t", 0, None, [])
    row = store.rollout(found.rollout_id).summary
    assert row.tags == {"split": "train", "anchor_task": "t", "anchor": "0"}
    assert row.agent == "a"
    add_demonstration(store, "failed", reward=0.5)
    add_demonstration(store, "eval", held_out=True)
    assert mine.next("t")[0].demonstration is None
    end(store, found, 1.0)
    [after] = mine.next("t")
    assert (after.demonstration, after.demonstration_turns) == (found.rollout_id, 1), (
        "it is its own demonstration now"
    )


@pytest.mark.databases("sqlite", "postgres")
def test_an_anchored_rollout_begins_with_the_demonstrations_turns(store: Store) -> None:
    add_demonstration(store)
    store.append([Reward(rollout_id="e", value=1.0, turn=1, name="deciding")])
    [found] = anchors(store).next("t")
    assert (found.task_id, found.anchor, found.demonstration) == ("t@2", 2, "e")
    stored = store.rollout_turns(found.rollout_id)
    assert stored == found.turns
    first, second, beside = stored
    assert extends(second.prompt_token_ids, first)
    assert second.parent_id == first.turn_id
    assert beside.parent_id == second.turn_id
    copied = {"source": "demonstration", "reward": 1.0}
    assert [turn.sampling for turn in stored] == [
        {**copied, "distance": 1},
        {**copied, "distance": 0},
        {**copied, "distance": 1, "taken": False},
    ]
    original = store.rollout_turns("e")
    for mine, theirs in zip(stored, original, strict=True):
        assert mine.completion_token_ids == theirs.completion_token_ids
        assert mine.turn_id != theirs.turn_id
    assert beside.request is None
    assert beside.response is None
    assert found.request == original[2].request
    assert found.responses == [turn.response for turn in original[:2]]


@pytest.mark.databases("sqlite", "postgres")
def test_of_several_successes_the_shortest_with_tokens_is_the_demonstration(store: Store) -> None:
    add_demonstration(store, "long", turns=5)
    add_demonstration(store, "short", turns=2)
    textual = RolloutStarted(rollout_id="text", task_id="t")
    [turn] = turns_of("text", 1)
    none = {"completion_token_ids": token_id_array(), "completion_logprobs": logprob_array()}
    store.append([textual, replace(turn, policy_versions=(), **none), *ended("text", 1.0)])  # type: ignore[arg-type]
    assert anchors(store).next("t")[0].demonstration == "short"


@pytest.mark.databases("sqlite", "postgres")
def test_rollback_moves_when_what_was_given_out_succeeded_and_counts_it_once(store: Store) -> None:
    add_demonstration(store)
    one, other = anchors(store), anchors(store)  # two processes, or one that started again
    first = [*one.next("t"), *other.next("t")]
    assert [found.anchor for found in first] == [2, 2]
    end(store, first[0], 1.0)
    for each in (one, other, one, other):
        assert each.next("t", counts=False)[0].anchor == 2, "one success is counted once"
    end(store, first[1], 1.0)
    standing = other.task_state("t").anchors
    assert standing is not None
    assert standing.results == {2: (True,)}
    one.next("t")  # which counts it
    moved = other.task_state("t").anchors
    assert moved is not None
    assert (moved.at, moved.results) == (1, {})


def test_an_anchor_that_moved_is_sampled_from_once_the_group_is_whole(store: Store) -> None:
    add_demonstration(store)
    mine = anchors(store, group_size=4, groups=3, window=1)
    [found] = mine.next("t")
    end(store, found, 1.0)
    assert [each.anchor for each in mine.next("t", count=5)] == [2, 2, 2, 1, 1]


@pytest.mark.databases("sqlite", "postgres")
def test_failures_that_are_not_the_policys_and_those_that_explore_do_not_count(
    store: Store,
) -> None:
    add_demonstration(store)
    mine = anchors(store)
    broken, explored, late, counted = (
        *mine.next("t"),
        *mine.next("t", counts=False),
        *mine.next("t", count=2),
    )
    end(store, broken, None, outcome=Outcome.ENV_ERROR)
    end(store, explored, 0.0)
    end(store, late, None)
    end(store, counted, 0.0, at=5)
    mine.next("t")
    standing = mine.task_state("t")
    assert standing.anchors is not None
    assert standing.anchors.results == {2: (False,)}
    waiting = {one.rollout_id for one in standing.pending}
    assert late.rollout_id in waiting, "its reward may still come"
    assert not waiting & {broken.rollout_id, explored.rollout_id, counted.rollout_id}
    store.append([Reward(rollout_id=late.rollout_id, value=1.0)])
    mine.next("t")
    after = mine.task_state("t").anchors
    assert after is not None
    assert after.results == {2: (False, True)}


def test_groups_come_in_a_row_from_one_anchor(store: Store) -> None:
    add_demonstration(store, turns=6)
    mine = anchors(store, mode="parallel", at_once=3, groups=3, group_size=4)
    given = [found.anchor for _ in range(3) for found in mine.next("t", count=4)]
    blocks = [given[i : i + 4] for i in range(0, 12, 4)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert len({block[0] for block in blocks}) == 3
    assert len({found.task_id for found in mine.next("t", count=4)}) == 1


def test_the_demonstration_is_refreshed_by_the_policys_own_success_if_it_is_no_longer(
    store: Store,
) -> None:
    add_demonstration(store, turns=4)
    mine = anchors(store, refresh=3, window=8)
    given = mine.next("t", count=4)
    for found, reward in zip(given, (0.0, 1.0, 1.0, 0.0), strict=True):
        end(store, found, reward)  # 3 turns of the demonstration's, and one of its own
    fresh = mine.next("t")[0]
    assert fresh.demonstration == given[2].rollout_id, "the newest of the successes"
    assert fresh.demonstration_turns == 4, "the turn that was not taken is none of them"
    assert fresh.anchor == 3
    taken = [turn for turn in store.rollout_turns(given[2].rollout_id)
             if turn.sampling.get("taken", True)]  # fmt: skip
    assert [t.completion_token_ids for t in fresh.turns] == [t.completion_token_ids for t in taken]
    # A success that took longer is no demonstration.
    later = mine.next("t", count=3)
    for found in later:
        parent = found.turns[found.anchor - 1]
        store.append([*turns_of(found.rollout_id, 2, parent=parent), *ended(found.rollout_id, 1.0)])
    assert mine.next("t")[0].demonstration == fresh.demonstration


def test_without_refresh_the_first_demonstration_stays(store: Store) -> None:
    add_demonstration(store)
    mine = anchors(store)
    for _ in range(4):
        end(store, mine.next("t")[0], 1.0)
    assert mine.next("t")[0].demonstration == "e"


def test_a_demonstration_that_was_removed_is_replaced_or_done_without(store: Store) -> None:
    add_demonstration(store, "first", turns=4)
    mine = anchors(store)
    assert mine.next("t")[0].demonstration == "first"
    remove(store, "first")
    [found] = mine.next("t")
    assert (found.demonstration, found.task_id, found.turns) == (None, "t", [])
    add_demonstration(store, "second", turns=2)
    [found] = mine.next("t")
    assert (found.demonstration, found.anchor) == ("second", 1)


@pytest.mark.databases("sqlite", "postgres")
def test_tasks_stand_apart_and_state_survives(store: Store) -> None:
    add_demonstration(store)
    mine = anchors(store)
    mine.next("t", count=3)
    assert mine.next("other")[0].demonstration is None
    standing = anchors(store).task_state("t")
    assert len(standing.pending) == 3
    assert standing.queue == (2,)
    with store.exclusive() as connection:
        connection.execute(update(TaskAnchors).values(state=standing.as_json()))
    assert mine.task_state("t") == standing


def test_what_makes_no_sense_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="count: 0"):
        anchors(store).next("t", count=0)


def test_a_turn_that_the_demonstrations_client_never_got_is_no_step_of_its(store: Store) -> None:
    first, refused, _ = turns_of("e", 3)
    retry, last = (replace(turn, turn_id=f"{turn.turn_id}.again") for turn in turns_of("e", 3)[1:])
    last = replace(last, parent_id=retry.turn_id)
    store.append([RolloutStarted(rollout_id="e", task_id="t"), first, refused])
    assert store.mark_unacknowledged([refused.turn_id]) == 1
    store.append([retry, last, *ended("e", 1.0)])
    [found] = anchors(store).next("t")
    assert (found.demonstration_turns, found.anchor) == (3, 2)
    assert [turn.untrainable for turn in found.turns] == [None] * 3
    for turn, after in pairwise(found.turns):
        assert after.parent_id == turn.turn_id

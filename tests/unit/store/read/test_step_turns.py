"""What the pages of training read: turns by key, steps by number, pushes; on both databases."""

from __future__ import annotations

from support.store.training_steps import trained_step, write_steps
from tracegrad.store import PolicyVersion, StepHistory, Store
from tracegrad.store.read.step_turns import turns_of_step
from tracegrad.store.read.versions import outcomes_of_versions


def test_turns_of_a_rollout_are_paged_in_order_of_capture(store: Store) -> None:
    trained_step(store, advantages={"t0.0.0": -0.75})
    with store.reading() as connection:
        first = turns_of_step(connection, "t0.0", limit=1)
        rest = turns_of_step(connection, "t0.0", first[0].key, limit=5)
        assert turns_of_step(connection, "t0.0", rest[-1].key, limit=5) == []
        assert turns_of_step(connection, "nobody", limit=5) == []
    found = [(t.key.number, t.turn_id, t.step, t.skip_reason, t.advantage) for t in (*first, *rest)]
    assert found == [(0, "t0.0.0", 1, None, -0.75), (1, "t0.0.1", None, "stale", None)]
    assert [turn.sampled_tokens for turn in (*first, *rest)] == [2, 2]


def test_steps_are_found_by_their_numbers(store: Store) -> None:
    history = StepHistory(store)
    assert (history.newest(), history.numbers(5), history.neighbours(1)) == (None, [], (None, None))
    write_steps(store, range(1, 4))
    write_steps(store, range(7, 9))
    assert history.newest() == 8
    assert history.numbers(3) == [3, 7, 8]
    assert [one.step for one in history.of_numbers([8, 2, 5])] == [2, 8]
    assert [one.step for one in history.page(2, before=8)] == [7, 3]
    assert history.neighbours(7) == (3, 8)
    assert history.neighbours(5) == (3, 7)
    assert history.count_after(3) == 2


def test_the_last_outcome_of_a_version_counts(store: Store) -> None:
    write_steps(store, range(1, 4))
    store.record_version(PolicyVersion(2, 2, "serving", detail={"paused_s": 9.0}))
    with store.reading() as connection:
        found = outcomes_of_versions(connection, [1, 2, 5], "serving")
        assert outcomes_of_versions(connection, [1, 2], "evaluated") == {}
    assert {n: one.detail["paused_s"] for n, one in found.items()} == {1: 0.25, 2: 9.0}

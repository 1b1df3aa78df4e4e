"""How a batch is divided over several optimizer steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from support.trainer.row_samples import rows
from tracegrad_trainer.batches import Row, mini_batches

ROWS = rows(24)


def of_rollouts(owners: list[int]) -> list[Row]:
    return [replace(ROWS[i], rollout_id=f"r{owner}") for i, owner in enumerate(owners)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=24), st.integers(1, 6), st.integers(0, 99))
def test_each_row_is_in_one_part_and_a_rollouts_rows_in_the_same(
    owners: list[int], parts: int, seed: int
) -> None:
    made = of_rollouts(owners)
    found = mini_batches(made, parts, seed=str(seed))
    assert Counter(i for part in found for i in part) == Counter(range(len(made)))
    assert all(found)
    assert len(found) <= parts
    of_rollout = {made[i].rollout_id: n for n, part in enumerate(found) for i in part}
    assert all(of_rollout[made[i].rollout_id] == n for n, part in enumerate(found) for i in part)


@given(st.integers(1, 6), st.integers(0, 99))
def test_parts_have_about_as_many_targets(parts: int, seed: int) -> None:
    found = mini_batches(ROWS, parts, seed=str(seed))
    sizes = [sum(int(ROWS[i].keep.sum()) for i in part) for part in found]
    longest = max(int(row.keep.sum()) for row in ROWS)
    assert len(found) == parts
    assert max(sizes) - min(sizes) <= 2 * longest


def test_the_seed_decides_which() -> None:
    first = mini_batches(ROWS, 3, seed="a")
    assert first == mini_batches(ROWS, 3, seed="a")
    assert first != mini_batches(ROWS, 3, seed="b")
    assert mini_batches(ROWS, 1, seed="a") == [list(range(24))]


def test_no_rows_are_one_part() -> None:
    assert mini_batches([], 3, seed="a") == [[]]

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learn_samples import rows

from tracegrad_trainer.batches import MicroBatch, micro_batch, pack, plan
from tracegrad_trainer.batches.packing import cost


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 4), st.integers(50, 120))
def test_a_plan_holds_every_row_once_within_the_budget(
    lengths: list[int], ranks: int, budget: int
) -> None:
    shares = plan(lengths, ranks=ranks, budget=budget)
    placed = [i for bins in shares for bin_ in bins for i in bin_]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for bins in shares for b in bins)
    assert len({len(bins) for bins in shares}) == 1
    loads = [sum(cost(lengths[i]) for b in bins for i in b) for bins in shares]
    if lengths:
        assert max(loads) - min(loads) <= cost(max(lengths)) + 1e-9


def test_a_row_beyond_the_budget_names_the_setting() -> None:
    with pytest.raises(ValueError, match="tokens_per_micro_batch"):
        plan([5, 11], ranks=1, budget=10)


def test_a_micro_batch_says_what_its_rows_say() -> None:
    made = rows(5)
    batch = micro_batch(made, [7, 8, 9, 10, 11])
    check(batch, made)
    assert batch.row_keys.tolist() == [7, 8, 9, 10, 11]
    assert batch.turns == 10


def test_without_takes_whole_rows_out() -> None:
    made = rows(5)
    batch = micro_batch(made, [7, 8, 9, 10, 11])
    left, targets = batch.without([8, 11])
    check(left, [made[0], made[2], made[3]])
    assert left.row_keys.tolist() == [7, 9, 10]
    assert left.mu.tolist() == batch.mu[targets].tolist()
    same, every = batch.without([3])
    assert same is batch
    assert every.all()
    filling, nothing = batch.without([7, 8, 9, 10, 11])
    assert (filling.tokens, len(filling.target), nothing.any()) == (2, 0, np.False_)


def check(batch: MicroBatch, made: list) -> None:  # type: ignore[type-arg]
    ids = np.concatenate([row.input_ids for row in made])
    assert batch.input_ids[0].tolist() == ids.tolist()
    assert batch.position_ids[0].tolist() == [i for row in made for i in range(len(row))]
    kept = np.concatenate([row.keep for row in made])
    assert batch.target.tolist() == np.flatnonzero(kept).tolist()
    assert batch.advantage.tolist() == np.concatenate([r.advantage for r in made])[kept].tolist()
    assert batch.version.tolist() == np.concatenate([r.policy_version for r in made])[kept].tolist()
    names = [(i, t) for i, row in enumerate(made) for t in row.turn_index[row.keep]]
    numbers = dict(zip(names, batch.turn.tolist(), strict=True))
    assert [numbers[name] for name in names] == batch.turn.tolist()
    assert sorted(set(numbers.values())) == list(range(batch.turns))
    assert batch.row.tolist() == [i for i, _ in names]


def test_ranks_without_rows_get_a_forward_without_targets() -> None:
    made = rows(3)
    shares = pack(made, ranks=2, budget=max(len(row) for row in made))
    assert [len(batches) for batches in shares] == [2, 2]
    filling = [b for batches in shares for b in batches if len(b.target) == 0]
    assert [b.row_keys.tolist() for b in filling] == [[-1]]
    assert [len(b) for b in pack([], ranks=2, budget=8)] == [1, 1]

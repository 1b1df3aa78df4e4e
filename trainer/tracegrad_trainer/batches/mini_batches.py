"""A batch's rows divided over several optimizer steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tracegrad_trainer.batches.rows import Row


def mini_batches(rows: Sequence[Row], parts: int, *, seed: str) -> list[list[int]]:
    """Row numbers of at most `parts` optimizer steps, each row in one; none is empty, but the
    only one of no rows.

    Rollouts are shuffled and cut into parts of about as many targets. A rollout's rows stay
    together: what is counted by rollout is counted over one optimizer step.
    """
    if parts == 1:
        return [list(range(len(rows)))]
    of_rollout: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        assert row.pair < 0, "pairs are of several rollouts"
        of_rollout.setdefault(row.rollout_id, []).append(number)
    rollouts = list(of_rollout.values())
    random.Random(seed).shuffle(rollouts)
    weights = [sum(int(rows[i].keep.sum()) for i in numbers) for numbers in rollouts]
    total, passed = max(sum(weights), 1), 0
    found: list[list[int]] = [[] for _ in range(parts)]
    for numbers, weight in zip(rollouts, weights, strict=True):
        middle = passed + weight / 2
        found[min(int(parts * middle / total), parts - 1)] += numbers
        passed += weight
    return [sorted(numbers) for numbers in found if numbers] or [[]]

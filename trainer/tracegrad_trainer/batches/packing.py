"""Rows into packed micro-batches, shared out over ranks.

Packing never changes what is computed: attention is blocked between rows, and every
denominator is counted over the whole optimizer step. It only decides how long that takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .micro_batch import MicroBatch, micro_batch, targets_of
from .rows import Row

# Where attention costs as much as everything else: a row of this many tokens counts double.
_QUADRATIC_TOKENS = 8192


def cost(tokens: int) -> float:
    """Relative time of a row: linear layers, and attention that grows with its square."""
    return tokens + tokens * tokens / _QUADRATIC_TOKENS


def plan(lengths: Sequence[int], *, ranks: int, budget: int) -> list[list[list[int]]]:
    """Share rows out: [rank][micro-batch] -> row numbers; equally many micro-batches a rank.

    Rows go to the least loaded rank, longest first, and are packed first-fit-decreasing to
    `budget` tokens. Ranks that need fewer micro-batches get empty ones: collectives match.

    Raises:
        ValueError: a row is longer than the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > budget:
        raise ValueError(
            f"a row of {lengths[order[0]]} tokens exceeds tokens_per_micro_batch ({budget}):"
            " raise it, or set max_row_tokens"
        )
    loads = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in order:
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += cost(lengths[i])
    packed = [_first_fit(share, lengths, budget) for share in shares]
    most = max(1, *(len(bins) for bins in packed))
    return [bins + [[] for _ in range(most - len(bins))] for bins in packed]


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, left in enumerate(room):
            if lengths[i] <= left:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def pack(
    rows: Sequence[Row], *, ranks: int, budget: int, keys: Sequence[int] | None = None
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank, [rank][micro-batch]; `keys` default to the row numbers."""
    keys = range(len(rows)) if keys is None else keys
    counts = targets_of(rows)

    def one(numbers: Sequence[int]) -> MicroBatch:
        return micro_batch(
            [rows[i] for i in numbers], [keys[i] for i in numbers], rollout_tokens=counts
        )

    return [
        [one(numbers) for numbers in bins]
        for bins in plan([len(row) for row in rows], ranks=ranks, budget=budget)
    ]

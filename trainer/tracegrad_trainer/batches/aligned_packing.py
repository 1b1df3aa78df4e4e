"""Micro-batches that ranks run at the same time, made alike over all ranks at once.

Ranks wait for each other at every micro-batch, so a step takes the sum of each micro-batch's
costliest. Whoever fills one rank after the other cannot see that sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

# [rank][micro-batch] -> numbers of what is packed.
Plan = list[list[list[int]]]

_NEAR = 1.01  # of what nothing is quicker than: good enough
# Places that are looked at for all rows, some seconds' worth; where there are more, rows are so
# many that ranks are busy anyway.
_MOST_PLACES = 60_000_000


def plan_cost(plan: Plan, costs: Sequence[float]) -> float:
    """Of a step: at every micro-batch all wait for the costliest."""
    loads = [[sum(costs[i] for i in bin_) for bin_ in bins] for bins in plan]
    return float(np.max(loads, axis=0).sum())


def aligned(
    plan: Plan, costs: Sequence[float], tokens: Sequence[int], *, ranks: int, budget: int
) -> Plan:
    """The plan itself, or one of the same rows that is quicker, with no more micro-batches."""
    # Nothing is quicker than the costliest row, and than ranks that are busy all the time.
    near = _NEAR * max([0.0, *costs, sum(costs) / ranks])
    quickest = plan_cost(plan, costs)
    others = _plans(costs, tokens, ranks=ranks, budget=budget, most=len(plan[0]))
    while quickest > near and (found := next(others, None)) is not None:
        if (cost := plan_cost(found, costs)) < quickest:
            plan, quickest = found, cost
    return plan


def _plans(
    costs: Sequence[float], tokens: Sequence[int], *, ranks: int, budget: int, most: int
) -> Iterator[Plan]:
    """Of `most` micro-batches a rank and of up to two fewer, as far as all fits in."""
    least = -(-sum(tokens) // (ranks * budget))
    for count in range(most, max(0, least - 1, most - 3), -1):
        if len(costs) * count * ranks > _MOST_PLACES:
            return
        for tight in (True, False):
            plan = _fill(costs, tokens, ranks=ranks, budget=budget, count=count, tight=tight)
            if plan is not None:
                yield plan


def _fill(
    costs: Sequence[float],
    tokens: Sequence[int],
    *,
    ranks: int,
    budget: int,
    count: int,
    tight: bool,
) -> Plan | None:
    """The costliest first, each to where the step grows least by it. Of places that are alike so
    far the one with the least space left (`tight`), or with the longest wait; None: no room."""
    loads = np.zeros((count, ranks))
    space = np.full((count, ranks), budget, np.int64)
    plan: Plan = [[[] for _ in range(count)] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], -tokens[i], i)):
        longest = loads.max(axis=1, keepdims=True)
        grows = np.maximum(loads + costs[i] - longest, 0.0)
        grows[space < tokens[i]] = np.inf
        least = grows.min()
        if np.isinf(least):
            return None
        alike = grows <= least + 1e-9 * costs[i]
        at = np.where(alike, space if tight else loads - longest, np.inf).argmin()
        slot, rank = divmod(int(at), ranks)
        plan[rank][slot].append(i)
        loads[slot, rank] += costs[i]
        space[slot, rank] -= tokens[i]
    order = [slot for slot in np.argsort(-loads.max(axis=1), kind="stable") if loads[slot].any()]
    return [[bins[slot] for slot in order] for bins in plan]

"""Rows into optimizer steps, and those into packed micro-batches, shared out over ranks.

Packing never changes what is computed: attention is blocked between rows, and every
denominator is counted over the whole optimizer step. It only decides how long that takes.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracegrad_trainer.batches import aligned_packing
from tracegrad_trainer.batches.aligned_packing import Plan, plan_cost
from tracegrad_trainer.batches.micro_batch import MicroBatch, StepCounts, micro_batch
from tracegrad_trainer.batches.rows import Row

# Where attention costs as much as everything else, in models of 0.6B: a row of this many tokens
# counts double. What is known of a model is better.
ATTENTION_PARITY = 8192.0
# Exchanges between ranks after the first shares: a few dozen bring all the gain there is.
_EXCHANGES = 64
# What sharing rows must save of a step's time: exchanges have latencies that nobody counts here.
_WORTH_SHARING = 0.1


@dataclass(frozen=True, slots=True)
class PackingRule:
    """What decides, besides rows and ranks, who gets which; a step records it.

    `parity` as in `row_cost`; `aligned`: as `plan_packing` has it. `group`: so many neighbouring
    ranks share every micro-batch where that is quicker (`shares_rows`); 1: none do. `exchange`:
    what that adds to the cost of a token, less its attention.
    """

    parity: float = ATTENTION_PARITY
    aligned: bool = True
    group: int = 1
    exchange: float = 0.0


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


def row_cost(tokens: int, parity: float = ATTENTION_PARITY) -> float:
    """Relative time of a row: linear layers, and attention that grows with its square; they cost
    the same at `parity` tokens."""
    return tokens + tokens * tokens / parity


def plan_packing(
    lengths: Sequence[int],
    *,
    ranks: int,
    budget: int,
    pairs: Sequence[int] = (),
    parity: float = ATTENTION_PARITY,
    aligned: bool = True,
) -> Plan:
    """Share rows out: [rank][micro-batch] -> row numbers; equally many micro-batches a rank.

    Rows whose number in `pairs` (one a row, if given) is the same and >= 0 stay together in one
    micro-batch. What stays together goes to the least loaded rank, the costliest first: no rank
    takes longer than 4/3 - 1/(3 ranks) of the best shares there are (Graham 1969, "Bounds on
    multiprocessing timing anomalies"). Exchanges between ranks then only shorten that.

    On its rank each share is packed first-fit-decreasing to `budget` tokens. Ranks wait for each
    other at every micro-batch, so they run their costliest at the same time; those that need
    fewer get empty ones: collectives match. Where that leaves them waiting, micro-batches are
    `aligned`: filled over all ranks at once, if a step is quicker by it (`aligned_packing`). No
    plan is quicker than the longest row.

    Raises:
        ValueError: a row or a pair is longer than the budget.
    """
    bundles = _bundles(len(lengths), pairs)
    tokens = [sum(lengths[i] for i in bundle) for bundle in bundles]
    costs = [sum(row_cost(lengths[i], parity) for i in bundle) for bundle in bundles]
    for bundle, size in zip(bundles, tokens, strict=True):
        if size > budget:
            raise ValueError(_too_long(len(bundle), size, budget))
    plan = _rank_by_rank(costs, tokens, ranks=ranks, budget=budget)
    if aligned:
        plan = aligned_packing.aligned(plan, costs, tokens, ranks=ranks, budget=budget)
    return [[[row for i in bin_ for row in bundles[i]] for bin_ in bins] for bins in plan]


def _rank_by_rank(
    costs: Sequence[float], tokens: Sequence[int], *, ranks: int, budget: int
) -> Plan:
    packed = []
    for share in _shares(costs, ranks):
        bins = _first_fit(share, tokens, budget)
        packed.append(sorted(bins, key=lambda bin_: -sum(costs[i] for i in bin_)))
    most = max(1, *(len(bins) for bins in packed))
    return [bins + [[] for _ in range(most - len(bins))] for bins in packed]


def shares_rows(
    parts: Sequence[Sequence[Row]], *, ranks: int, budget: int, rule: PackingRule
) -> bool:
    """Whether the optimizer steps on these rows are quicker where groups of `rule.group` ranks
    share their micro-batches, which then hold so many times `budget` tokens."""
    if rule.group == 1:
        return False

    def time(size: int, exchange: float) -> float:
        found = 0.0
        for rows in parts:
            lengths = [len(row) for row in rows]
            plan = plan_packing(
                lengths,
                ranks=ranks // size,
                budget=size * budget,
                pairs=[row.pair for row in rows],
                parity=rule.parity,
                aligned=rule.aligned,
            )
            costs = [exchange * n + row_cost(n, rule.parity) for n in lengths]
            found += plan_cost(plan, costs) / size
        return found

    return time(rule.group, rule.exchange) < (1 - _WORTH_SHARING) * time(1, 0.0)


def _too_long(rows: int, tokens: int, budget: int) -> str:
    what = "a row" if rows == 1 else f"a pair of {rows} rows"
    return (
        f"{what} of {tokens} tokens exceeds tokens_per_micro_batch ({budget}):"
        " raise it, or lower max_row_tokens"
    )


def _bundles(rows: int, pairs: Sequence[int]) -> list[list[int]]:
    """Row numbers that must stay together."""
    assert len(pairs) in (0, rows)
    bundles: list[list[int]] = []
    of_pair: dict[int, list[int]] = {}
    for i in range(rows):
        pair = pairs[i] if pairs else -1
        if pair >= 0 and pair in of_pair:
            of_pair[pair].append(i)
        else:
            bundles.append([i])
            of_pair[pair] = bundles[-1]
    return bundles


def _shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + costs[i], rank))
    load_of = [load for load, _ in sorted(loads, key=lambda pair: pair[1])]
    for _ in range(_EXCHANGES):
        if not _exchange(shares, load_of, costs):
            break
    return shares


def _exchange(shares: list[list[int]], loads: list[float], costs: Sequence[float]) -> bool:
    """Moves load from the fullest rank to the emptiest, by one bundle or one for another."""
    high, low = loads.index(max(loads)), loads.index(min(loads))
    gap = loads[high] - loads[low]
    # What the emptiest may give back: nothing, or one of its own; by cost.
    back: list[tuple[float, int]] = sorted([(0.0, -1), *((costs[i], i) for i in shares[low])])
    best, found = gap / 2 - 1e-9 * (1 + gap), None
    for i in shares[high]:
        # Half the gap is the best that can move; one on either side of it comes nearest.
        at = bisect_left(back, (costs[i] - gap / 2, -1))
        for value, j in back[max(at - 1, 0) : at + 1]:
            off = abs(costs[i] - value - gap / 2)
            if off < best:
                best, found = off, (i, j)
    if found is None:
        return False
    i, j = found
    shares[high].remove(i)
    shares[low].append(i)
    if j >= 0:
        shares[low].remove(j)
        shares[high].append(j)
    moved = costs[i] - (costs[j] if j >= 0 else 0.0)
    loads[high] -= moved
    loads[low] += moved
    return True


def _first_fit(share: Sequence[int], tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Each into the first micro-batch that has space for it, the longest first."""
    bins: list[list[int]] = []
    space: list[int] = []
    for i in sorted(share, key=lambda i: (-tokens[i], i)):
        for b, left in enumerate(space):
            if tokens[i] <= left:
                bins[b].append(i)
                space[b] -= tokens[i]
                break
        else:
            bins.append([i])
            space.append(budget - tokens[i])
    return bins


def pack(
    rows: Sequence[Row],
    *,
    ranks: int,
    budget: int,
    keys: Sequence[int] | None = None,
    rule: PackingRule = PackingRule(),
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank, [rank][micro-batch]; `keys` default to the row numbers.

    Raises:
        ValueError: a row, or the rows of a preference pair together, exceed the budget.
    """
    keys = range(len(rows)) if keys is None else keys
    counts = StepCounts.of(rows)
    shares = plan_packing(
        [len(row) for row in rows],
        ranks=ranks,
        budget=budget,
        pairs=[row.pair for row in rows],
        parity=rule.parity,
        aligned=rule.aligned,
    )
    return [
        [micro_batch([rows[i] for i in bin_], [keys[i] for i in bin_], counts) for bin_ in bins]
        for bins in shares
    ]


def packing_stats(
    shares: Sequence[Sequence[MicroBatch]], *, budget: int, parity: float = ATTENTION_PARITY
) -> dict[str, float]:
    """How well `pack` did, for the step's metrics.

    `micro_batches` are those of one rank; `pack_fill` is the share of their token budgets that
    rows fill; `pack_balance` the share of the ranks' time, by cost, that none of them waits for
    another at a micro-batch.
    """
    tokens = 0
    busy, taken = 0.0, 0.0
    for at_once in zip(*shares, strict=True):
        lengths = [batch.row_lengths[batch.row_keys >= 0] for batch in at_once]
        tokens += sum(int(each.sum()) for each in lengths)
        costs = [sum(row_cost(n, parity) for n in each.tolist()) for each in lengths]
        busy += float(np.mean(costs))
        taken += max(costs)
    space = sum(len(bins) for bins in shares) * budget
    return {
        "micro_batches": float(len(shares[0])),
        "pack_fill": tokens / space,
        "pack_balance": busy / taken if taken else 1.0,
    }

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trainer.batch_samples import Rollout
from support.trainer.row_samples import rows, turn
from tracegrad_trainer.batches import (
    MicroBatch,
    PackingRule,
    Row,
    micro_batch,
    mini_batches,
    pack,
    packing_stats,
    plan_packing,
    rows_of,
    shares_rows,
)
from tracegrad_trainer.batches.aligned_packing import plan_cost
from tracegrad_trainer.batches.packing import row_cost


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Lengths, pairs, ranks, and a budget that everything fits."""
    lengths = draw(st.lists(st.integers(1, 50), max_size=40))
    pairs = [draw(st.sampled_from([-1, -1, 0, 1, 2, 3])) for _ in lengths]
    sizes: dict[int, int] = {}
    for length, pair in zip(lengths, pairs, strict=True):
        sizes[pair] = sizes.get(pair, 0) + length
    largest = max([1, *lengths, *(size for pair, size in sizes.items() if pair >= 0)])
    return lengths, pairs, draw(st.integers(1, 4)), largest + draw(st.integers(0, 60))


@settings(max_examples=300, deadline=None)
@given(shares())
def test_a_plan_holds_every_row_once_within_the_budget(
    made: tuple[list[int], list[int], int, int],
) -> None:
    lengths, pairs, ranks, budget = made
    planned = plan_packing(lengths, ranks=ranks, budget=budget, pairs=pairs)
    assert len(planned) == ranks
    placed = [i for bins in planned for bin_ in bins for i in bin_]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for bins in planned for b in bins)
    assert len({len(bins) for bins in planned}) == 1
    together: dict[int, set[tuple[int, int]]] = {}
    for rank, bins in enumerate(planned):
        for number, bin_ in enumerate(bins):
            for i in bin_:
                together.setdefault(pairs[i], set()).add((rank, number))
    assert all(len(where) == 1 for pair, where in together.items() if pair >= 0)
    # Somebody needs as many micro-batches as everybody gets.
    assert not lengths or any(bins[-1] for bins in planned)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4))
def test_no_rank_has_more_than_the_mean_and_the_costliest_row(
    lengths: list[int], ranks: int
) -> None:
    loads = loads_of(lengths, ranks)
    assert max(loads) <= np.mean(loads) + row_cost(max(lengths)) + 1e-9


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_near_the_best_there_is(lengths: list[int], ranks: int) -> None:
    best = min(
        max(
            sum(row_cost(n) for n, at in zip(lengths, places, strict=True) if at == rank)
            for rank in range(ranks)
        )
        for places in product(range(ranks), repeat=len(lengths))
    )
    assert max(loads_of(lengths, ranks)) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-6


@settings(max_examples=200, deadline=None)
@given(shares())
def test_aligned_micro_batches_never_take_longer(
    made: tuple[list[int], list[int], int, int],
) -> None:
    lengths, pairs, ranks, budget = made
    now, before = (
        plan_packing(lengths, ranks=ranks, budget=budget, pairs=pairs, aligned=aligned)
        for aligned in (True, False)
    )
    costs = [row_cost(n) for n in lengths]
    assert plan_cost(now, costs) <= plan_cost(before, costs) + 1e-9
    assert len(now[0]) <= len(before[0])
    # What nothing can be quicker than: the longest row, and all ranks busy all the time.
    assert plan_cost(now, costs) >= max([0.0, *costs, sum(costs) / ranks]) - 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_a_step_is_near_the_quickest_there_is(seed: int) -> None:
    """Of two ranks, with up to three micro-batches each: every way to place the rows."""
    draw = np.random.default_rng(seed)
    lengths, budget = draw.integers(1, 5000, 6).tolist(), int(draw.integers(5000, 9000))
    costs = [row_cost(n) for n in lengths]
    best = min(
        plan_cost(plan, costs)
        for count in (1, 2, 3)
        for places in product(range(2 * count), repeat=len(lengths))
        if (plan := _placed(places, count, lengths, budget)) is not None
    )
    assert plan_cost(plan_packing(lengths, ranks=2, budget=budget), costs) <= 1.12 * best


def _placed(
    places: tuple[int, ...], count: int, lengths: list[int], budget: int
) -> list[list[list[int]]] | None:
    plan: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(2)]
    for i, place in enumerate(places):
        plan[place % 2][place // 2].append(i)
    fits = all(sum(lengths[i] for i in bin_) <= budget for bins in plan for bin_ in bins)
    return plan if fits else None


def test_exchanges_mend_what_longest_first_gets_wrong() -> None:
    # Longest first leaves 3 + 2 + 2 beside 3 + 2; costs are nearly the lengths.
    assert sorted(map(round, loads_of([3, 3, 2, 2, 2], 2))) == [6, 6]
    # 14 + 13 + 7 beside 19 + 8: 13 goes for 8, and whatever could go next makes it worse again.
    assert sorted(map(round, loads_of([19, 7, 14, 8, 13], 2))) == [29, 32]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_no_two_micro_batches_of_a_rank_would_fit_into_one(lengths: list[int], budget: int) -> None:
    (bins,) = plan_packing(lengths, ranks=1, budget=budget)
    totals = sorted(sum(lengths[i] for i in bin_) for bin_ in bins)
    assert len(totals) < 2 or totals[0] + totals[1] > budget


def loads_of(lengths: list[int], ranks: int) -> list[float]:
    planned = plan_packing(lengths, ranks=ranks, budget=sum(lengths))
    return [sum(row_cost(lengths[i]) for b in bins for i in b) for bins in planned]


def test_ranks_run_their_costliest_micro_batches_at_the_same_time() -> None:
    lengths = [60, 60, 100, 100, 30, 30]
    planned = plan_packing(lengths, ranks=2, budget=100)
    assert [[sum(lengths[i] for i in b) for b in bins] for bins in planned] == [[100, 90]] * 2
    # First fit opens with the longest row, which is less than the two that come next.
    assert plan_packing([55, 50, 50], ranks=1, budget=100) == [[[1, 2], [0]]]
    # Aligned ones too, which are filled in another order.
    assert plan_packing([4, 5, 5, 3, 5], ranks=2, budget=9) == [[[4], [1]], [[0, 3], [2]]]


def test_aligned_micro_batches_are_no_more_than_they_need() -> None:
    plans = [
        plan_packing([2, 5, 3, 6, 4, 3], ranks=2, budget=6, aligned=aligned)
        for aligned in (True, False)
    ]
    assert [len(plan[0]) for plan in plans] == [2, 3]


def test_rows_of_pairs_are_aligned_with_the_others() -> None:
    lengths, pairs = [5, 1, 5, 1, 5], [-1, 7, -1, 7, -1]
    plan = plan_packing(lengths, ranks=2, budget=9, pairs=pairs)
    costs = [row_cost(n) for n in lengths]
    assert plan_cost(plan, costs) == pytest.approx(10, rel=0.01)
    apart = plan_packing(lengths, ranks=2, budget=9, pairs=pairs, aligned=False)
    assert plan_cost(apart, costs) == pytest.approx(12, rel=0.01)


def test_a_pair_beyond_the_budget_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"a pair of 2 rows of 12 tokens exceeds tokens_per_mic"):
        plan_packing([6, 6, 1], ranks=1, budget=10, pairs=[4, 4, -1])
    assert plan_packing([6, 6], ranks=1, budget=10) == [[[0], [1]]]


def test_a_pairs_rows_are_in_one_micro_batch() -> None:
    made = [replace(row, pair=i % 2, label=1 - 2 * (i // 2)) for i, row in enumerate(rows(4))]
    (bins,) = pack(made, ranks=1, budget=80)
    assert sorted(batch.pair.tolist() for batch in bins) == [[0, 0], [1, 1]]
    left, targets = bins[0].without_rows([int(bins[0].row_keys[1])])
    # What is left of a pair compares nothing.
    assert (left.row_keys.tolist(), targets.any()) == ([-1], np.False_)


def test_the_pack_says_how_full_and_how_even_it_is() -> None:
    made = rows(3)
    budget = max(map(len, made))
    shares = pack(made, ranks=2, budget=budget)
    stats = packing_stats(shares, budget=budget)
    lengths = sorted(map(len, made))
    assert stats["micro_batches"] == 2
    assert stats["pack_fill"] == sum(lengths) / (4 * budget)  # one of the four is filling
    # Side by side: the longest beside the second, the third beside filling.
    third, second, longest = map(row_cost, lengths)
    assert stats["pack_balance"] == pytest.approx(
        (longest + second + third) / 2 / (max(longest, second) + third)
    )
    assert packing_stats(pack([], ranks=2, budget=8), budget=8)["pack_balance"] == 1


def test_a_row_beyond_the_budget_names_the_setting() -> None:
    with pytest.raises(ValueError, match="tokens_per_micro_batch"):
        plan_packing([5, 11], ranks=1, budget=10)


def test_a_micro_batch_says_what_its_rows_say() -> None:
    made = rows(5)
    batch = micro_batch(made, [7, 8, 9, 10, 11])
    check(batch, made)
    assert batch.row_keys.tolist() == [7, 8, 9, 10, 11]
    assert batch.turns == 10


def test_without_takes_whole_rows_out() -> None:
    made = rows(5)
    batch = micro_batch(made, [7, 8, 9, 10, 11])
    left, targets = batch.without_rows([8, 11])
    check(left, [made[0], made[2], made[3]])
    assert left.row_keys.tolist() == [7, 9, 10]
    assert left.rollout_logprobs.tolist() == batch.rollout_logprobs[targets].tolist()
    same, every = batch.without_rows([3])
    assert same is batch
    assert every.all()
    filling, nothing = batch.without_rows([7, 8, 9, 10, 11])
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


def test_rollouts_and_groups_are_counted_over_all_micro_batches() -> None:
    """Rows 2i and 2i + 1 are of one group."""
    made = [replace(row, rollout_id=f"r{i // 2}") for i, row in enumerate(rows(7))]
    sizes = [int(row.keep.sum()) for row in made]
    for batches in pack(made, ranks=2, budget=max(map(len, made))):
        for batch in batches:
            for number, key in enumerate(batch.row_keys.tolist()):
                here = batch.row == number
                expected = sum(sizes[key // 2 * 2 : key // 2 * 2 + 2])
                assert (batch.group_tokens[here] == expected).all()
                assert (batch.rollout_tokens[here] == expected).all()


# A batch divided over several optimizer steps

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


@pytest.mark.parametrize("seed", range(4))
def test_a_rollout_is_in_the_part_that_has_most_of_it(seed: int) -> None:
    """One of three times the other's targets: two parts, whichever comes first."""
    made = [
        row
        for name, targets in (("short", 2), ("long", 6))
        for row in rows_of(
            Rollout(name, 1.0, [turn(name, [1], range(targets))]), group_id="g", advantages=[1.0]
        )
    ]
    assert sorted(mini_batches(made, 2, seed=str(seed))) == [[0], [1]]


def test_the_seed_decides_which() -> None:
    first = mini_batches(ROWS, 3, seed="a")
    assert first == mini_batches(ROWS, 3, seed="a")
    assert first != mini_batches(ROWS, 3, seed="b")
    assert mini_batches(ROWS, 1, seed="a") == [list(range(24))]


def test_no_rows_are_one_part() -> None:
    assert mini_batches([], 3, seed="a") == [[]]


def test_rows_are_shared_out_by_what_they_cost_in_the_model() -> None:
    """A row of 100 tokens against four of 25: as long, and of more attention."""
    lengths = [100, 25, 25, 25, 25]
    (one, two) = plan_packing(lengths, ranks=2, budget=200, parity=1e12)
    assert sorted(sorted(i for bin_ in bins for i in bin_) for bins in (one, two)) == [
        [0],
        [1, 2, 3, 4],
    ]
    assert row_cost(100, 1e12) == pytest.approx(100)
    assert row_cost(100, 100) == 200
    made = rows(6)
    shares = pack(made, ranks=2, budget=100)
    plain, steep = (packing_stats(shares, budget=100, parity=each) for each in (1e12, 1.0))
    assert plain["pack_balance"] != steep["pack_balance"]


@pytest.mark.parametrize("tail", ["log-normal", "pareto"])
@pytest.mark.parametrize(("ranks", "rows_"), [(64, 4096), (8, 512), (4, 128), (2, 128)])
def test_aligned_micro_batches_keep_ranks_busier(ranks: int, rows_: int, tail: str) -> None:
    """The lengths and the figures of docs/training.md (Rows that ranks share)."""
    now, before = (
        np.mean([_balance(_lengths(rows_, tail, seed), ranks, aligned=each) for seed in range(2)])
        for each in (True, False)
    )
    assert now > before + 0.01


@pytest.mark.parametrize("tail", ["log-normal", "pareto"])
@pytest.mark.parametrize("rows_", [256, 512, 1024])
def test_groups_that_share_rows_keep_64_ranks_busy(rows_: int, tail: str) -> None:
    """As many as there are on a machine. Alone, and where the longest row is longer than all else
    that a group would have, nothing but that row decides."""
    for seed in range(3):
        lengths = _lengths(rows_, tail, seed)
        costs = [row_cost(n) for n in lengths]
        bound = min(1.0, sum(costs) / 64 / max(costs))
        assert _balance(lengths, 64) == pytest.approx(bound, rel=0.16)
        assert _balance(lengths, 64, group=8) > 0.97 * min(1.0, 8 * bound)


def _sharing(rows_: list[Row], budget: int, **rule: float) -> bool:
    made = PackingRule(group=2, **rule)  # type: ignore[arg-type]
    return shares_rows([rows_], ranks=2, budget=budget, rule=made)


def test_rows_are_shared_where_a_step_is_quicker_by_it() -> None:
    made = rows(3)
    budget = sum(map(len, made))
    assert _sharing(made[:1], budget), "the other rank would wait"
    assert not _sharing([made[0], made[0]], budget), "none waits"
    assert not _sharing(made[:1], budget, exchange=1.0), "what is won is lost by the exchange"
    assert _sharing(made[:1], budget, exchange=0.7)
    assert not shares_rows([made[:1]], ranks=2, budget=budget, rule=PackingRule())
    assert not shares_rows([[]], ranks=2, budget=budget, rule=PackingRule(group=2))


def test_groups_fill_the_budgets_of_all_their_ranks() -> None:
    made = [
        row
        for tokens in (5, 6, 4, 4)
        for row in rows_of(
            Rollout("r", 1.0, [turn("t", [1], range(tokens - 1))]), group_id="g", advantages=[1.0]
        )
    ]
    assert [len(row) for row in made] == [5, 6, 4, 4]
    # Of two groups one has 6 + 4, in one micro-batch.
    assert shares_rows([made], ranks=4, budget=9, rule=PackingRule(group=2))


def _lengths(count: int, tail: str, seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    if tail == "pareto":
        drawn = 500 * (1 + draw.pareto(1.2, size=count))
    else:
        drawn = 2000 * np.exp(draw.normal(size=count))
    lengths: list[int] = np.clip(drawn, 1, 32_768).astype(int).tolist()
    return lengths


def _balance(lengths: list[int], ranks: int, group: int = 1, *, aligned: bool = True) -> float:
    """As `packing_stats` has it: the ranks of a group have equal parts of its micro-batches."""
    plan = plan_packing(lengths, ranks=ranks // group, budget=group * 32_768, aligned=aligned)
    costs = [row_cost(n) for n in lengths]
    return sum(costs) / (plan_cost(plan, costs) * len(plan))

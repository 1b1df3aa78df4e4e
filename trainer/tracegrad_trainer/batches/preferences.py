"""Preference data from groups: pairs for DPO, labels and mismatched rows for KTO.

What is compared are whole trajectories: all trained rows of one rollout against all of another
of its group, observations in between as context (as ETO does it, arXiv 2403.02502). Turns that
both begin with, token for token, have the same log-probabilities on both sides and cancel in the
difference of log-ratios, so this is the comparison from the first turn on which they part. Of
pairs whose rewards differ as much, those that share the longest beginning come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad.turn_scopes import TurnScope
from tracegrad.turn_tree import common_prefix
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.rows import PER_TOKEN, Row
from tracegrad_trainer.batches.select import GroupLike, TrainingSelection, select
from tracegrad_trainer.batches.stats import row_stats, turn_stats
from tracegrad_trainer.losses.advantages import RolloutRewards

Pairing = Literal["best_worst", "all"]
Side = Sequence[Row]  # of one rollout


def unit_advantages(rollouts: Sequence[RolloutRewards]) -> list[NDArray[np.float64]]:
    """Advantage 1 for every turn: what is imitated, not compared (`select(advantages=ones)`)."""
    return [np.ones(len(rollout.tokens)) for rollout in rollouts]


def preference_pairs(
    groups: Sequence[GroupLike],
    settings: BatchSettings,
    *,
    current_version: int,
    choose: Pairing = "best_worst",
    most: int = 8,
    vocabulary: int | None = None,
    scopes: Mapping[str, TurnScope] = {},
) -> TrainingSelection:
    """Rows of preference pairs: equal `pair`, `label` 1 for the better side, -1 for the worse.

    `choose`: the best against the worst of each group, or all better against all worse, the
    largest differences first, at most `most` a group. Ties are no pairs; pairs that do not fit
    into a micro-batch together are left out. A rollout in several pairs has its rows in each; in
    `trained` a turn stands once. A turn in no pair is skipped as `over_long` (its rollout was in
    a pair that did not fit), `equal_reward` (its group has no pair) or `unpaired`.

    Raises:
        ValueError: as `select`.
    """
    chosen = _candidates(groups, settings, current_version, vocabulary, scopes)
    sides = _sides(chosen.rows)
    rows: list[Row] = []
    reasons: dict[str, str] = {}
    counts = dict.fromkeys(("pairs", "pairs_tied", "pairs_over_long", "pairs_other_prompt"), 0)
    for group in groups:
        here = [sides[r.rollout_id] for r in group.rollouts if r.rollout_id in sides]
        found = _pairs(here)
        fitting = [pair for pair in found if pair.tokens <= settings.tokens_per_micro_batch]
        reasons |= _why_unpaired(here, found, fitting)
        counts["pairs_tied"] += len(here) * (len(here) - 1) // 2 - len(found)
        counts["pairs_over_long"] += len(found) - len(fitting)
        for pair in fitting[: 1 if choose == "best_worst" else most]:
            rows += pair.rows(counts["pairs"])
            counts["pairs"] += 1
            counts["pairs_other_prompt"] += not pair.same_prompt
    return _used(chosen, rows, reasons, counts)


def _why_unpaired(
    sides: Sequence[Side], found: Sequence[_Pair], fitting: Sequence[_Pair]
) -> dict[str, str]:
    """By rollout, in case that none of its pairs is taken."""
    too_long = {_rollout(s) for p in found if p not in fitting for s in (p.better, p.worse)}
    reason = "unpaired" if found else "equal_reward"
    return dict.fromkeys(map(_rollout, sides), reason) | dict.fromkeys(too_long, "over_long")


def labelled_rows(
    groups: Sequence[GroupLike],
    settings: BatchSettings,
    *,
    current_version: int,
    threshold: float | None = None,
    vocabulary: int | None = None,
    scopes: Mapping[str, TurnScope] = {},
) -> TrainingSelection:
    """Rows with `label` 1 where the reward is above the threshold, else -1; all rows of a rollout
    together are one example.

    `threshold` None: the mean over the rollout's group, filtered or not; then groups of equal
    rewards teach nothing and are skipped as `equal_reward`.

    Raises:
        ValueError: as `select`.
    """
    # A row is to have one prompt and one completion: see `mismatched`.
    settings = settings.model_copy(update={"shared_prefix": "paths"})
    chosen = _candidates(groups, settings, current_version, vocabulary, scopes)
    sides = _sides(chosen.rows)
    rows: list[Row] = []
    equal: dict[str, str] = {}
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        bar = float(np.mean(rewards)) if threshold is None else threshold
        for rollout in group.rollouts:
            if threshold is None and min(rewards) == max(rewards):
                equal[rollout.rollout_id] = "equal_reward"
                continue
            label = 1 if rollout.reward > bar else -1
            rows += [replace(row, label=label) for row in sides.get(rollout.rollout_id, ())]
    labels = [row.label for row in rows]
    return _used(chosen, rows, equal, {"chosen": labels.count(1), "rejected": labels.count(-1)})


def mismatched_rows(rows: Sequence[Row], *, limit: int) -> list[Row]:
    """For KTO's z: each row's prompt with a later row's completion, which alone is kept.

    A completion is all from a row's first target on. Sorted by group, the rows are rotated by the
    size of the largest, so that each meets another group's prompt as long as no group holds more
    than half of them (answers to the same prompt would match). Each completion is used once; rows
    that would be longer than `limit` tokens are left out, a single row has no other.

    Raises:
        ValueError: a row is a tree.
    """
    if any(row.subtree_end is not None for row in rows):
        raise ValueError("kto needs batches.shared_prefix = 'paths': a tree has no one completion")
    rows = sorted(rows, key=lambda row: row.group_id)
    count = len(rows)
    shift = max(Counter(row.group_id for row in rows).values(), default=0)
    shift = 1 if shift == count else shift
    made = [_joined(row, rows[(i + shift) % count]) for i, row in enumerate(rows) if count > 1]
    return [row for row in made if len(row) <= limit]


def _joined(first: Row, second: Row) -> Row:
    prompt, start = _first_target(first), _first_target(second)

    changed: dict[str, Any] = {
        "input_ids": np.concatenate([first.input_ids[:prompt], second.input_ids[start:]])
    }
    for name, (dtype, context) in PER_TOKEN.items():
        values = getattr(second, name)[start:]
        changed[name] = np.concatenate([np.full(prompt, context, dtype), values])
    return replace(second, **changed)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    better: Side
    worse: Side
    shared: int  # tokens that both begin with

    @property
    def gap(self) -> float:
        return self.better[0].score - self.worse[0].score

    def rows(self, number: int) -> list[Row]:
        sides = ((1, self.better), (-1, self.worse))
        return [replace(row, pair=number, label=label) for label, side in sides for row in side]

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in (*self.better, *self.worse))

    @property
    def same_prompt(self) -> bool:
        prompt = _first_target(self.better[0])
        return prompt == _first_target(self.worse[0]) and prompt <= self.shared


def _pairs(sides: Sequence[Side]) -> list[_Pair]:
    """All of different reward; the best to compare first, in the order of `sides` among equals."""
    found = []
    for a, b in combinations(sides, 2):
        if a[0].score != b[0].score:
            better, worse = (a, b) if a[0].score > b[0].score else (b, a)
            shared = common_prefix(better[0].input_ids, worse[0].input_ids)
            found.append(_Pair(better, worse, shared))
    return sorted(found, key=lambda pair: (-pair.gap, -pair.shared))


def _first_target(row: Row) -> int:
    return int(row.keep.argmax())


def _rollout(side: Side) -> str:
    return side[0].rollout_id


def _sides(rows: Sequence[Row]) -> dict[str, list[Row]]:
    sides: dict[str, list[Row]] = {}
    for row in rows:
        sides.setdefault(row.rollout_id, []).append(row)
    return sides


def _candidates(
    groups: Sequence[GroupLike],
    settings: BatchSettings,
    current_version: int,
    vocabulary: int | None,
    scopes: Mapping[str, TurnScope],
) -> TrainingSelection:
    """Everything that may be compared, ties included: pairs decide about those."""
    return select(
        groups,
        settings.model_copy(update={"drop_equal_reward": False, "stale": "drop"}),
        advantages=unit_advantages,
        current_version=current_version,
        vocabulary=vocabulary,
        scopes=scopes,
    )


def _used(
    chosen: TrainingSelection,
    rows: list[Row],
    reasons: Mapping[str, str],
    counts: Mapping[str, int],
) -> TrainingSelection:
    """What of the candidates became `rows`; `reasons` of rollouts that did not."""
    trained = list(dict.fromkeys(turn_id for row in rows for turn_id in row.kept_turn_ids))
    used = set(trained)
    unused = {
        turn_id: reasons[row.rollout_id]
        for row in chosen.rows
        for turn_id in row.kept_turn_ids
        if turn_id not in used
    }
    skipped = chosen.skipped | unused
    kept = {name: v for name, v in chosen.stats.items() if not name.startswith("skipped_")}
    return TrainingSelection(
        rows=rows,
        trained=trained,
        skipped=skipped,
        rollouts=chosen.rollouts,
        stats={
            **kept,
            **turn_stats(len(trained) + len(skipped), skipped),
            **row_stats(rows),
            **{name: float(n) for name, n in counts.items()},
        },
    )

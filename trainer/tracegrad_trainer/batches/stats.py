"""Metrics of a selection, for the step's record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tracegrad.events import Turn
from tracegrad.turn_tree import TurnTree
from tracegrad_trainer.batches.expert_routing import known_tokens
from tracegrad_trainer.batches.rows import Row
from tracegrad_trainer.batches.turn_access import is_demonstration, length_of
from tracegrad_trainer.batches.version_scale import VersionScale

LAST_LAG = 8

Numbers = NDArray[np.float64]


def reward_stats(
    rewards: Numbers, group: NDArray[np.int64], equal: Sequence[bool]
) -> dict[str, float]:
    """`group_spread`: mean over the groups of the deviation of rewards within one."""
    spread = [float(rewards[group == g].std()) for g in np.unique(group)]
    return {
        "groups": float(len(equal)),
        "groups_equal_reward": float(sum(equal)),
        "rollouts": float(len(rewards)),
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "group_spread": float(np.mean(spread)) if spread else 0.0,
    }


def advantage_stats(advantage: Sequence[Numbers]) -> dict[str, float]:
    values = np.abs(np.concatenate([*advantage, np.zeros(0)]))
    return {"advantage_abs_mean": float(values.mean()) if len(values) else 0.0}


def turn_stats(turns: int, skipped: Mapping[str, str]) -> dict[str, float]:
    """`skipped_REASON` counts turns; only reasons that occur are there."""
    return {
        "turns": float(turns),
        "turns_skipped": float(len(skipped)),
        **{f"skipped_{why}": float(n) for why, n in sorted(Counter(skipped.values()).items())},
    }


def stale_stats(
    turns: Sequence[Turn], skipped: Mapping[str, str], versions: VersionScale
) -> dict[str, float]:
    """Of the sampled tokens, whatever becomes of them: `lag_share_N` lag N updates (`LAST_LAG`: so
    many and more), `stale_token_share` are too old to be trained."""
    sampled = [turn for turn in turns if not is_demonstration(turn)]
    tokens = sum(len(turn.completion_token_ids) for turn in sampled)
    stale = sum(
        len(turn.completion_token_ids) for turn in sampled if skipped.get(turn.turn_id) == "stale"
    )
    lags: Counter[int] = Counter()
    for turn in sampled:
        for version, count in turn.policy_versions:
            lags[min(LAST_LAG, max(0, versions.current - versions.place(version)))] += count
    known = lags.total()
    return {
        "sampled_tokens": float(tokens),
        "stale_token_share": stale / tokens if tokens else 0.0,
        **{f"lag_share_{lag}": number / known for lag, number in sorted(lags.items())},
    }


def state_stats(turns: Sequence[Turn]) -> dict[str, float]:
    """By what the state is known that each sampled turn began in."""
    sampled = [turn for turn in turns if not is_demonstration(turn)]
    given = sum(turn.state_key is not None for turn in sampled)
    seen = sum(turn.state_key is None and turn.observation is not None for turn in sampled)
    return {
        "states_given": float(given),
        "states_observed": float(seen),
        "states_unknown": float(len(sampled) - given - seen),
    }


def row_stats(rows: Sequence[Row]) -> dict[str, float]:
    """`target_share`: of the tokens that are computed, those that are trained."""
    tokens = sum(len(row) for row in rows)
    targets = sum(int(np.count_nonzero(row.keep)) for row in rows)
    return {
        "rows": float(len(rows)),
        "rows_tree": float(sum(row.subtree_end is not None for row in rows)),
        "row_tokens": float(tokens),
        "row_tokens_longest": float(max((len(row) for row in rows), default=0)),
        "target_tokens": float(targets),
        "target_share": targets / tokens if tokens else 0.0,
    }


def routing_stats(rows: Sequence[Row]) -> dict[str, float]:
    """`expert_routing_known_share`: of the tokens that are computed, those whose experts the
    serving engine reported. A row's last token is never among them, nor is it used."""
    tokens = sum(len(row) for row in rows)
    return {
        "expert_routing_known_share": sum(known_tokens(row.expert_routing) for row in rows)
        / max(tokens, 1)
    }


def path_stats(trees: Sequence[TurnTree[Turn]], *, tokens: int, too_long: int) -> dict[str, float]:
    """Of the trees of trained turns, a rollout each: `paths` lead to the last of them; `forks`
    are those beyond a rollout's first.

    `tokens_saved`: what the rows, put as paths, would have had besides their `tokens`.
    `trees_too_long`: trees that are paths because a row cannot hold them.
    """
    paths = sum(len(tree.leaves) for tree in trees)
    in_paths = sum(length_of(tree.turns[leaf]) for tree in trees for leaf in tree.leaves)
    return {
        "paths": float(paths),
        "forks": float(paths - sum(bool(tree.leaves) for tree in trees)),
        "tokens_saved": float(in_paths - tokens),
        "trees_too_long": float(too_long),
    }

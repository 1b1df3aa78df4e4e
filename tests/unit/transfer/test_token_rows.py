"""Token rows are those that our own trainer makes: two programs, one meaning."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from support.transfer.random_stores import fill
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.copy.export_records import RolloutRecord, iter_rollouts
from tracegrad.transfer.token_rows import token_rows
from tracegrad_integrations.exports.eligibility import (
    eligible_rows,
    imitation_exclusion,
    policy_exclusion,
)
from tracegrad_trainer import batches


class Rollout:
    """What our trainer asks of one."""

    def __init__(self, copy: RolloutRecord) -> None:
        self.rollout_id = copy.rollout_id
        self.reward = 1.0
        self.turns = list(copy.turns)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_our_trainers(store: Store, seed: int) -> None:
    fill(store, seed, rollouts=16)
    chance = random.Random(seed)
    compared = 0
    for copy in iter_rollouts(store, raw=False):
        left_out = {turn.turn_id for turn in copy.turns if untellable(turn)}
        left_out |= {turn.turn_id for turn in copy.turns if chance.random() < 0.2}
        mine = list(token_rows(copy.turns, left_out))
        theirs = batches.rows_of(
            Rollout(copy), group_id="g", advantages=[1.0] * len(copy.turns), skipped=left_out
        )
        assert len(mine) == len(theirs)
        for row, other in zip(mine, theirs, strict=True):
            assert row.token_ids.tolist() == other.input_ids.tolist()
            assert row.mask == other.keep.astype(int).tolist()
            kept = np.where(other.keep, other.rollout_logprobs, np.float32(0))
            np.testing.assert_array_equal(np.frombuffer(row.logprobs, np.float32), kept)
            assert [turn.turn_id for turn in row.turns] == other.kept_turn_ids
            assert row.versions == list(dict.fromkeys(other.policy_version[other.keep].tolist()))
        owned = Counter(turn.turn_id for row in mine for turn in row.turns)
        assert owned == Counter({turn.turn_id for turn in copy.turns} - left_out)
        compared += len(mine)
    assert compared > 3


def untellable(turn: Turn) -> bool:
    return not turn.completion_token_ids or not turn.prompt_token_ids


@pytest.mark.parametrize("reason", [imitation_exclusion, policy_exclusion])
def test_every_turn_has_a_row_or_a_reason(store: Store, reason: object) -> None:
    fill(store, 1, rollouts=24)
    left_out: Counter[str] = Counter()
    owned = 0
    turns = 0
    for copy in iter_rollouts(store, raw=False):
        rows = list(eligible_rows(copy, reason, left_out))  # type: ignore[arg-type]
        owned += sum(len(row.turns) for row in rows)
        turns += len(copy.turns)
    assert owned > 0
    assert owned + left_out.total() == turns
    known = {"no_tokens", "no_prompt", "over_length", "non_finite"}
    assert set(left_out) <= {f"turns: {name}" for name in known}

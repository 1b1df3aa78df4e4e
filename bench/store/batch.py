"""A training batch: 256 rollouts of 20 turns, leased and loaded as the trainer does it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from bench.store.places import Place
from bench.store.rollouts import BATCH, rollout
from tracegrad.events import Reward, RolloutFinished
from tracegrad.store import Ledger, Store

GROUP = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """The median of some times; tokens are those of all turns' contexts, as they are loaded."""

    place: str
    rollouts: int
    turns: int
    unique_tokens: int
    last_context: int
    seconds: float
    turns_per_s: float


def batch(place: Place, groups: int, times: int) -> Batch:
    with place.store() as store:
        for number in range(groups):
            _group(store, number)
        ledger, taken = Ledger(store), []
        for _ in range(times):
            start = time.perf_counter()
            leased = ledger.lease(groups=groups, group_size=GROUP, owner="bench", ttl_s=600)
            taken.append(time.perf_counter() - start)
            turns = [turn for group in leased for one in group.rollouts for turn in one.turns]
            ledger.release(leased)
    rollouts = groups * GROUP
    assert len(turns) == rollouts * BATCH.turns
    last, seconds = turns[-1], statistics.median(taken)
    return Batch(
        place.name,
        rollouts,
        len(turns),
        rollouts * BATCH.unique_tokens,
        len(last.prompt_token_ids) + len(last.completion_token_ids),
        seconds,
        len(turns) / seconds,
    )


def _group(store: Store, number: int) -> None:
    """The rollouts of one task, with their texts."""
    for _ in range(GROUP):
        made = rollout(BATCH, number)
        rollout_id = made.opened.rollout_id
        reward = Reward(rollout_id=rollout_id, value=0.5)
        store.append([made.opened, *made.turns, reward, RolloutFinished(rollout_id=rollout_id)])

"""Scoring that ends when nothing is left to do: before `trainer step`, and `trainer score`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tracegrad.store import Store
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.rewards.scoring import Again, ScoringRun, ScoringScope, ScoringTotals


def score_now(
    store: Store,
    settings: RewardSettings,
    scope: ScoringScope,
    *,
    rollout_ids: Collection[str] | None = None,
    again: Again = "no",
) -> ScoringTotals:
    """All that is due now; groups are judged smaller, where nobody completes them.

    Raises:
        FunctionUnusable: a function cannot be imported.
        ValueError: the judge has no key.
        StoreError: the store is no use.
    """

    async def score() -> ScoringTotals:
        async with ScoringRun(store, settings, scope) as run:
            return await run.finish(rollout_ids=rollout_ids, again=again)

    return asyncio.run(score())

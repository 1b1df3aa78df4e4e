"""How fast batches are built: from turns in memory to micro-batches, on made-up rollouts."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from support.trainer.batch_samples import Rollout, Task
from tracegrad.events import Turn
from tracegrad_trainer.batches import BatchSettings, pack, select, unit_advantages


@dataclass(frozen=True)
class Built:
    """`tokens` are those of the rows: what a row holds of context counts once."""

    tokens: int
    targets: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def append_only(
    *, groups: int, group_size: int, turns: int = 20, tokens: int = 8000, sampled: int = 100
) -> list[Task]:
    """Rollouts of `tokens` tokens each, whose every turn continues the one before, as agents with
    tools make them: each turn holds its whole prompt, as the store gives it. `sampled`: of a turn.
    """
    rng = np.random.default_rng(0)
    return [
        Task(
            f"task-{g}",
            [
                Rollout(name, float(r % 2), _chain(name, rng, turns, tokens // turns, sampled))
                for r in range(group_size)
                for name in [f"rollout-{g}-{r}"]
            ],
        )
        for g in range(groups)
    ]


def _chain(name: str, rng: np.random.Generator, turns: int, each: int, sampled: int) -> list[Turn]:
    ids = array("i", rng.integers(0, 32000, turns * each).tolist())
    return [
        Turn(
            turn_id=f"{name}.{i}",
            rollout_id=name,
            parent_id=f"{name}.{i - 1}" if i else None,
            dialect="chat",
            model="m",
            prompt_token_ids=ids[: (i + 1) * each - sampled],
            completion_token_ids=ids[(i + 1) * each - sampled : (i + 1) * each],
            completion_logprobs=array("f", [-0.5]) * sampled,
            policy_versions=((1, sampled),),
            sampling={"temperature": 1.0},
        )
        for i in range(turns)
    ]


def build(groups: Sequence[Task], settings: BatchSettings, *, ranks: int = 1) -> Built:
    """Select, make rows and pack, once. The time is this thread's own: others share the cores."""
    gc.collect()
    start = time.thread_time()
    selection = select(
        groups, settings, advantages=unit_advantages, current_version=1, vocabulary=32000
    )
    shares = pack(selection.rows, ranks=ranks, budget=settings.tokens_per_micro_batch)
    seconds = time.thread_time() - start
    return Built(
        tokens=sum(len(row) for row in selection.rows),
        targets=sum(len(batch.target) for bins in shares for batch in bins),
        seconds=seconds,
    )

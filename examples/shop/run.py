"""The shop's play: agent, tasks, model. Used by `demo`, `controls` and the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import drive, play, tasks
from .acts import settle
from .play import Plan, Play
from .screen import Screen
from .stage import Stage

__all__ = ["GROUPS", "PLAY", "SAMPLES", "SERVE", "Plan", "learn", "settle", "warm_up"]

STEPS = 32
GROUPS = 16
SAMPLES = 8

SERVE: Mapping[str, object] = {
    "ranks": 2,
    "data.tags": '{"split": "train"}',
    "batches.groups": GROUPS,
    "batches.group_size": SAMPLES,
    "batches.tokens_per_micro_batch": 2048,
    # The agent waits before more than three batches are under way, so that no turn gets too old.
    "batches.stale": "wait",
    "batches.max_staleness": 2,
    # Turns are up to two versions old. With `grpo` one run of ten got stuck with invalid calls, and
    # three of twelve of the SQL agent's, where most questions were answered and the gradient was of
    # the few failures: it divides by a group's spread, and with one optimizer step a batch its
    # ratio is 1, so that a token that was made rare since it was sampled is pushed down as hard as
    # ever. `minirl` does neither.
    "objective.preset": "minirl",
    "objective.aggregation": "token_mean",
    "optim.lr": 5e-4,
    "fsdp.reshard": "false",
    "fsdp.threads": 1,
    "vllm.max_model_len": 512,
    "vllm.kv_cache_memory_bytes": 128 << 20,
}


def warm_up(plan: Plan, screen: Screen) -> Path:
    from .warm_start import Recipe, warm_start

    recipe = Recipe(seed=plan.model_seed)
    return screen.warm_start(recipe.steps, lambda seen: warm_start(plan.root, recipe, seen))


PLAY = Play(
    title="The shop's agent, trained while it runs",
    settings=SERVE,
    steps=STEPS,
    groups=GROUPS,
    samples=SAMPLES,
    warm_up=warm_up,
    attempts=lambda _: drive.attempt,
    exam=tasks.exam,
    train_tasks=tasks.train_tasks,
)


async def learn(plan: Plan, stage: Stage, screen: Screen) -> None:
    """Sends training tasks to the agent until the trainer has made its steps and is idle."""
    await play.learn(PLAY, plan, drive.attempt, stage, screen)

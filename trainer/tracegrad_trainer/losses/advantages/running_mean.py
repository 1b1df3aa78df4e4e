"""Rewards less a running mean: for traffic that comes without groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracegrad_trainer.losses.advantages.base import ADVANTAGES, AdvantageMemory, PerTurn, Rollouts
from tracegrad_trainer.losses.advantages.group_stats import over_turns
from tracegrad_trainer.losses.config import ObjectiveSettings

# Means that are kept; those that were not used for longest go first. Where every call is a task
# of its own, nothing else would bound the memory.
MAX_KEPT = 10_000


@ADVANTAGES.register("running")
def running(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """R - the task's running mean; for a task never seen before the agent's; 0 for a new agent.

    The means are exponential (`running_decay` a rollout) and those of before the batch, so no
    rollout is compared with itself. After it, n rollouts of mean m move a mean b to
    decay^n b + (1 - decay^n) m: their order does not matter. The first ones set it.

    `memory` has {"running": {"tasks": {task: mean}, "agents": {agent: mean}}}.
    """
    known = memory.setdefault("running", {"tasks": {}, "agents": {}})
    tasks: dict[str, float] = known["tasks"]
    agents: dict[str, float] = known["agents"]
    values = np.array(
        [r.reward - tasks.get(r.task, agents.get(r.agent, r.reward)) for r in rollouts], np.float64
    )
    rewards = [r.reward for r in rollouts]
    _update(tasks, [r.task for r in rollouts], rewards, settings.running_decay)
    _update(agents, [r.agent for r in rollouts], rewards, settings.running_decay)
    return over_turns(rollouts, values)


def _update(
    known: dict[str, float], names: Sequence[str], rewards: Sequence[float], decay: float
) -> None:
    of_name: dict[str, list[float]] = {}
    for name, reward in zip(names, rewards, strict=True):
        of_name.setdefault(name, []).append(reward)
    for name, some in of_name.items():
        mean, stays = float(np.mean(some)), decay ** len(some)
        before = known.pop(name, mean)  # taken out and put last: the newest
        known[name] = stays * before + (1 - stays) * mean
    for name in list(known)[: max(0, len(known) - MAX_KEPT)]:
        del known[name]

"""Scored rollouts made by hand or by hypothesis, and what an advantage says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tracegrad_trainer.losses import AdvantageMemory, RolloutRewards, compute_advantages, preset
from tracegrad_trainer.losses.advantages import DemonstrationOutcome


def scored(
    reward: float,
    group: int = 0,
    *,
    turns: int = 1,
    tokens: Sequence[int] | None = None,
    turn_rewards: Sequence[float] | None = None,
    parents: Sequence[int] | None = None,
    states: Sequence[bytes | None] | None = None,
    deciding: int | None = None,
    demonstrated: Mapping[int, DemonstrationOutcome] | None = None,
    task: str | None = None,
    agent: str = "a",
    rollout_id: str = "r",
) -> RolloutRewards:
    """A rollout of `turns` turns (or as many as lists are long), each under the one before it."""
    given = next((x for x in (tokens, turn_rewards, parents, states) if x is not None), None)
    turns = turns if given is None else len(given)
    return RolloutRewards(
        rollout_id=rollout_id,
        task=str(group) if task is None else task,
        agent=agent,
        group=group,
        reward=reward,
        turn_rewards=np.array([0.0] * turns if turn_rewards is None else turn_rewards, np.float64),
        tokens=np.array([1] * turns if tokens is None else tokens, np.int64),
        parents=np.array(range(-1, turns - 1) if parents is None else parents, np.int64),
        states=[bytes([k]) for k in range(turns)] if states is None else list(states),
        deciding_turn=deciding,
        demonstrations=demonstrated or {},
    )


def values(
    name: str,
    rollouts: Sequence[RolloutRewards],
    memory: AdvantageMemory | None = None,
    **settings: Any,
) -> list[list[float]]:
    """By rollout, one number a turn."""
    chosen = preset("grpo", advantage=name, **settings)
    found = compute_advantages(chosen, rollouts, {} if memory is None else memory)
    assert [len(numbers) for numbers in found] == [len(r.tokens) for r in rollouts]
    return [numbers.tolist() for numbers in found]


def flat(turns: Sequence[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(turns))


@st.composite
def batches(draw: st.DrawFn, smallest: float = -4.0) -> list[RolloutRewards]:
    """Up to 10 rollouts of up to 3 groups, with forks, equal states and turns without tokens."""
    rewards = st.integers(int(smallest * 4), 16).map(lambda x: x / 4)
    rollouts = []
    for i in range(draw(st.integers(0, 10))):
        turns = draw(st.integers(0, 5))
        rollouts.append(
            scored(
                draw(rewards),
                draw(st.integers(0, 2)),
                tokens=[draw(st.integers(0, 7)) for _ in range(turns)],
                turn_rewards=[draw(rewards) for _ in range(turns)],
                parents=[draw(st.integers(-1, k - 1)) for k in range(turns)],
                states=[draw(st.sampled_from([b"x", b"y", None])) for _ in range(turns)],
                task=draw(st.sampled_from(["t", "u"])),
                agent=draw(st.sampled_from(["a", "b"])),
                rollout_id=f"r{i}",
            )
        )
    return rollouts

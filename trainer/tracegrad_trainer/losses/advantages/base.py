"""What an advantage is made of, and the registry of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.registry import Registry

Numbers = NDArray[np.float64]
Whole = NDArray[np.int64]
# JSON-able; kept in checkpoints, so that a run that goes on remembers.
AdvantageMemory = dict[str, Any]


class DemonstrationOutcome(NamedTuple):
    """An expert's turn, by what the expert's own attempt came to."""

    reward: float
    distance: int  # turns from it to the expert's deciding one


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutRewards:
    """A rollout with K turns, in the order in which it took them: that of capture."""

    rollout_id: str
    task: str
    agent: str
    group: int  # 0, 1, ... in the batch
    reward: float  # of the rollout
    turn_rewards: Numbers  # [K] given to the turn; 0 where nothing was
    tokens: Whole  # [K] sampled ones
    parents: Whole  # [K] the turn that it continues; -1: none
    states: Sequence[bytes | None]  # [K] of the environment; equal ones are equal; None: unknown
    deciding_turn: int | None = None  # the turn that decided the outcome; None: not known
    demonstrations: Mapping[int, DemonstrationOutcome] = field(
        default_factory=dict
    )  # turns of an expert

    def __post_init__(self) -> None:
        turns = len(self.tokens)
        assert len(self.turn_rewards) == len(self.parents) == len(self.states) == turns


Rollouts = Sequence[RolloutRewards]
PerTurn = list[Numbers]  # for each rollout [K], one number a turn
Advantage = Callable[[Rollouts, ObjectiveSettings, AdvantageMemory], PerTurn]

ADVANTAGES: Registry[Advantage] = Registry("advantage")

"""What an advantage is made of, and the registry of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..registry import Registry

if TYPE_CHECKING:
    from ..settings import ObjectiveSettings

Numbers = NDArray[np.float64]
Whole = NDArray[np.int64]
# JSON-able; kept in checkpoints, so that a run that goes on remembers.
Memory = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scored:
    """A rollout with K turns, in order of capture."""

    rollout_id: str
    task: str
    agent: str
    group: int  # 0, 1, ... in the batch
    reward: float  # of the rollout
    turn_rewards: Numbers  # [K] given to the turn; 0 where nothing was
    tokens: Whole  # [K] sampled ones
    parents: Whole  # [K] the turn that it continues; -1: none
    states: Sequence[bytes]  # [K] equal prompts have equal ones

    def __post_init__(self) -> None:
        turns = len(self.tokens)
        assert len(self.turn_rewards) == len(self.parents) == len(self.states) == turns


Advantage = Callable[[Sequence[Scored], "ObjectiveSettings", Memory], list[Numbers]]

ADVANTAGES: Registry[Advantage] = Registry("advantage")

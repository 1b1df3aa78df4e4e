"""What batches need to know of rollouts, and what may be read off their turns."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tracegrad.events import Turn
from tracegrad_trainer.losses.advantages import DemonstrationOutcome

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


# `sampling.source` of a demonstrated turn; "expert" is what stores before 0.1 hold.
DEMONSTRATION_SOURCES = ("demonstration", "expert")


@runtime_checkable
class RolloutLike(Protocol):
    """What a row needs of a rollout; the store's `RolloutSample` has it.

    It may also have `turn_rewards` (a turn's index in `turns` -> its reward), `deciding_turn`
    (the index of the one that decided the outcome), `agent` and `outcome`.
    """

    @property
    def rollout_id(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def turns(self) -> Sequence[Turn]: ...


def is_demonstration(turn: Turn) -> bool:
    """Whether the turn is a demonstration: no policy sampled it, whatever is recorded with it."""
    return turn.sampling.get("source") in DEMONSTRATION_SOURCES


def temperature_of(turn: Turn) -> float:
    """The temperature the turn was sampled at; an engine's default is 1, a demonstration's is 1."""
    value = None if is_demonstration(turn) else turn.sampling.get("temperature")
    return 1.0 if value is None else float(value)


def is_cut_short(turn: Turn) -> bool:
    """Whether its limit ended the reply. vLLM says "tool_calls" of one that was cut inside a call
    or behind it, where it does not stream: its length shows that."""
    if turn.finish_reason != "tool_calls":
        return turn.finish_reason == "length"
    limit = turn.sampling.get("max_completion_tokens") or turn.sampling.get("max_tokens")
    return isinstance(limit, int) and len(turn.completion_token_ids) >= limit


def as_int_array(values: array[int]) -> Ints:
    """A view, not a copy."""
    return np.frombuffer(values, np.int32) if len(values) else np.zeros(0, np.int32)


def length_of(turn: Turn) -> int:
    return len(turn.prompt_token_ids) + len(turn.completion_token_ids)


def turn_rewards(rollout: RolloutLike) -> Mapping[int, float]:
    given: Mapping[int, float] = getattr(rollout, "turn_rewards", {})
    return given


def demonstration_outcomes(turns: Sequence[Turn]) -> dict[int, DemonstrationOutcome]:
    """The outcomes of demonstrated turns, by index: what the demonstrator's own attempt came to.

    `sampling` holds it (`reward`, and `distance` in turns to the deciding one). Where it does not,
    the demonstration succeeded (1), and its last turn here decided.

    Raises:
        ValueError: one of the two is not a finite number, or a distance below 0.
    """
    demonstrated = [index for index, turn in enumerate(turns) if is_demonstration(turn)]
    found = {}
    for index in demonstrated:
        sampling = turns[index].sampling
        reward, distance = sampling.get("reward"), sampling.get("distance")
        reward = 1.0 if reward is None else reward
        distance = demonstrated[-1] - index if distance is None else distance
        if not isinstance(reward, int | float) or not np.isfinite(reward):
            raise ValueError(f"sampling.reward of expert turn {turns[index].turn_id}: {reward!r}")
        if not isinstance(distance, int) or distance < 0:
            raise ValueError(
                f"sampling.distance of expert turn {turns[index].turn_id}: {distance!r}; write how"
                " many turns there are to the expert's deciding one"
            )
        found[index] = DemonstrationOutcome(float(reward), distance)
    return found


def state_before(turn: Turn) -> bytes | None:
    """The environment's state before the turn: the key that was given, else what was observed
    last. None: neither is known, or the turn is a demonstration."""
    if is_demonstration(turn):
        return None
    if turn.state_key is not None:
        return b"given " + turn.state_key.encode("utf-8", "surrogatepass")
    return None if turn.observation is None else b"observed " + turn.observation.encode()


def credited_rewards(rollout: RolloutLike, skipped: Collection[str]) -> dict[str, float]:
    """Turn rewards by turn id. A skipped turn's go to the nearest turn of the rollout before it
    that is trained: a filter takes a turn away, not what its predecessors led to."""
    found: dict[str, float] = {}
    for index, reward in turn_rewards(rollout).items():
        if index >= len(rollout.turns):
            continue  # of a turn that came later than this batch
        while index >= 0 and rollout.turns[index].turn_id in skipped:
            index -= 1
        if index >= 0:
            turn_id = rollout.turns[index].turn_id
            found[turn_id] = found.get(turn_id, 0.0) + reward
    return found

"""What batches need to know of rollouts, and what may be read off their turns."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.records import Turn

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class RolloutLike(Protocol):
    """What a row needs of a rollout; the store's `RolloutSample` has it.

    It may also have `turn_rewards` (a turn's index in `turns` -> its reward), `agent` and
    `outcome`.
    """

    @property
    def rollout_id(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def turns(self) -> Sequence[Turn]: ...


def is_expert(turn: Turn) -> bool:
    """Whether an expert wrote the turn: no policy sampled it, whatever is recorded with it."""
    return turn.sampling.get("source") == "expert"


def temperature_of(turn: Turn) -> float:
    """The temperature the turn was sampled at; an engine's default is 1, an expert's is 1."""
    value = None if is_expert(turn) else turn.sampling.get("temperature")
    return 1.0 if value is None else float(value)


def ints(values: array[int]) -> Ints:
    """A view, not a copy."""
    return np.frombuffer(values, np.int32) if len(values) else np.zeros(0, np.int32)


def length_of(turn: Turn) -> int:
    return len(turn.prompt_token_ids) + len(turn.completion_token_ids)


def oldest_version(turn: Turn) -> int:
    return min(version for version, _ in turn.policy_versions)


def turn_rewards(rollout: RolloutLike) -> Mapping[int, float]:
    given: Mapping[int, float] = getattr(rollout, "turn_rewards", {})
    return given


class Digests(NamedTuple):
    """Equal tokens have equal ones."""

    prompt: bytes
    whole: bytes  # the prompt and the completion


def digests_of(turns: Sequence[Turn]) -> list[Digests]:
    """One a turn. Where the turn that it continues came before it, only what is new is read: a
    conversation is hashed once, not once a turn."""
    known: dict[str, tuple[hashlib.blake2b, int]] = {}
    made = []
    for turn in turns:
        before, read = known.get(turn.parent_id or "", (hashlib.blake2b(digest_size=16), 0))
        prompt = before.copy()
        prompt.update(ints(turn.prompt_token_ids)[read:].data)
        whole = prompt.copy()
        whole.update(ints(turn.completion_token_ids).data)
        known[turn.turn_id] = (whole, length_of(turn))
        made.append(Digests(prompt.digest(), whole.digest()))
    return made


def with_ancestors(turns: Sequence[Turn], skipped: Collection[str]) -> list[Turn]:
    """The turns that are not skipped, and those that they continue."""
    by_id = {turn.turn_id: turn for turn in turns}
    needed: set[str] = set()
    for turn in turns:
        current: Turn | None = None if turn.turn_id in skipped else turn
        while current is not None and current.turn_id not in needed:
            needed.add(current.turn_id)
            current = by_id.get(current.parent_id or "")
    return [turn for turn in turns if turn.turn_id in needed]


def credited(rollout: RolloutLike, skipped: Collection[str]) -> dict[str, float]:
    """Turn rewards by turn id. A skipped turn's go to the nearest turn before it on its path
    that is trained: a filter takes a turn away, not what its predecessors led to."""
    by_id = {turn.turn_id: turn for turn in rollout.turns}
    found: dict[str, float] = {}
    for index, reward in turn_rewards(rollout).items():
        if not 0 <= index < len(rollout.turns):
            continue  # of a turn that came later than this batch
        turn: Turn | None = rollout.turns[index]
        while turn is not None and turn.turn_id in skipped:
            turn = by_id.get(turn.parent_id or "")
        if turn is not None:
            found[turn.turn_id] = found.get(turn.turn_id, 0.0) + reward
    return found

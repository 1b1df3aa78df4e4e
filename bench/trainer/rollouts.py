"""Rollouts to train on: append-only conversations whose lengths vary, as sampled ones do."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracegrad.events import Turn

VERSION = 1
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges of numbers of turns and of lengths in tokens, drawn evenly; ends included."""

    name: str
    turns: Range
    prompt: Range  # of the first turn
    sampled: Range
    said: Range  # between two turns

    @property
    def words(self) -> str:
        return (
            f"{self.name}: {_words(self.turns)} turns, a prompt of {_words(self.prompt)} tokens,"
            f" {_words(self.sampled)} sampled a turn and {_words(self.said)} said between"
        )


LONG = Shape("20 turns", (20, 20), (100, 300), (8, 72), (4, 44))
MIXED = Shape("short mixed", (1, 4), (16, 256), (8, 128), (8, 64))


@dataclass(frozen=True)
class Attempt:
    """A rollout, as a batch takes it."""

    rollout_id: str
    reward: float
    turns: tuple[Turn, ...]

    @cached_property
    def tokens(self) -> int:
        """Of the one row that it makes."""
        last = self.turns[-1]
        return len(last.prompt_token_ids) + len(last.completion_token_ids)

    @property
    def sampled(self) -> int:
        return sum(len(turn.completion_token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Task:
    group_id: str
    rollouts: tuple[Attempt, ...]


def tasks(shape: Shape, groups: int, group_size: int, vocabulary: int) -> list[Task]:
    """The same for the same arguments. In a group no two rewards are equal."""
    rng = np.random.default_rng(0)
    made = []
    for g in range(groups):
        prompt = _tokens(rng, shape.prompt, vocabulary)
        attempts = tuple(
            _attempt(f"r{g}.{i}", i / group_size, shape, prompt, rng, vocabulary)
            for i in range(group_size)
        )
        made.append(Task(f"g{g}", attempts))
    return made


def _attempt(
    rollout_id: str,
    reward: float,
    shape: Shape,
    prompt: array[int],
    rng: np.random.Generator,
    vocabulary: int,
) -> Attempt:
    turns: list[Turn] = []
    context = prompt
    for k in range(int(rng.integers(*shape.turns, endpoint=True))):
        if turns:
            context = context + _tokens(rng, shape.said, vocabulary)
        reply = _tokens(rng, shape.sampled, vocabulary)
        # Near what a random model says: further off every ratio to it is at its bound.
        logprobs = rng.normal(-math.log(vocabulary), 0.1, len(reply))
        turns.append(
            Turn(
                turn_id=f"{rollout_id}.{k}",
                rollout_id=rollout_id,
                parent_id=turns[-1].turn_id if turns else None,
                dialect="chat",
                model="m",
                prompt_token_ids=context,
                completion_token_ids=reply,
                completion_logprobs=array("f", logprobs.tolist()),
                policy_versions=((VERSION, len(reply)),),
            )
        )
        context = context + reply
    return Attempt(rollout_id, reward, tuple(turns))


def _tokens(rng: np.random.Generator, lengths: Range, vocabulary: int) -> array[int]:
    count = rng.integers(*lengths, endpoint=True)
    return array("i", rng.integers(0, vocabulary, count, dtype=np.int32).tobytes())


def _words(given: Range) -> str:
    low, high = given
    return str(low) if low == high else f"{low} to {high}"

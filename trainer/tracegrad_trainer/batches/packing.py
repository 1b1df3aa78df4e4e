"""Rows into packed micro-batches, shared out over ranks.

Packing never changes what is computed: attention is blocked between rows, and every
denominator is counted over the whole optimizer step. It only decides how long that takes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rows import Row

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

# Where attention costs as much as everything else: a row of this many tokens counts double.
_QUADRATIC_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One forward: T packed tokens of R rows, n of them targets (`loss_mask & keep`).

    `position_ids` restarts with each row. Arrays of n describe the targets only: `target` is
    the place in the pack, `turn` and `row` number the turns and rows of this micro-batch.
    `row_keys` says which rows of the batch these are; -1 is filling that carries no target.
    """

    input_ids: Longs  # [1, T]
    position_ids: Longs  # [1, T]
    row_lengths: Longs  # [R]
    row_keys: Longs  # [R]
    target: Longs  # [n]
    row: Longs  # [n]
    turn: Longs  # [n]
    turns: int
    mu: Floats  # [n] rollout log-probabilities
    advantage: Floats  # [n]
    temperature: Floats  # [n]
    version: Longs  # [n]

    def __post_init__(self) -> None:
        tokens, targets = int(self.row_lengths.sum()), len(self.target)
        assert self.input_ids.shape == self.position_ids.shape == (1, tokens)
        assert self.row_keys.shape == self.row_lengths.shape
        for name in ("row", "turn", "mu", "advantage", "temperature", "version"):
            assert getattr(self, name).shape == (targets,), f"{name}: one entry a target"
        assert not targets or (self.position_ids[0, self.target] > 0).all()
        assert not targets or int(self.turn.max()) == self.turns - 1

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[1])

    def without(self, keys: Collection[int]) -> tuple[MicroBatch, NDArray[np.bool_]]:
        """The micro-batch less the rows of these keys; which targets stay, bool[n]."""
        stay = ~np.isin(self.row_keys, list(keys))
        targets = stay[self.row]
        if stay.all():
            return self, targets
        if not stay.any():
            return _filling(), targets
        tokens = np.repeat(stay, self.row_lengths)
        _, turn = np.unique(self.turn[targets], return_inverse=True)
        return MicroBatch(
            input_ids=self.input_ids[:, tokens],
            position_ids=self.position_ids[:, tokens],
            row_lengths=self.row_lengths[stay],
            row_keys=self.row_keys[stay],
            target=(np.cumsum(tokens) - 1)[self.target[targets]],
            row=(np.cumsum(stay) - 1)[self.row[targets]],
            turn=turn.astype(np.int64),
            turns=int(turn.max()) + 1 if len(turn) else 0,
            mu=self.mu[targets],
            advantage=self.advantage[targets],
            temperature=self.temperature[targets],
            version=self.version[targets],
        ), targets


def micro_batch(rows: Sequence[Row], keys: Sequence[int]) -> MicroBatch:
    """Concatenate rows; without rows: the smallest forward, which has no target."""
    if not rows:
        return _filling()
    assert len(rows) == len(keys)
    lengths = np.array([len(row) for row in rows], np.int64)
    kept = [np.flatnonzero(row.keep) for row in rows]
    starts = np.cumsum(lengths) - lengths
    turn, turns = _number_turns(rows, kept)

    def gather(name: str) -> NDArray[Any]:
        parts = [getattr(row, name)[where] for row, where in zip(rows, kept, strict=True)]
        return np.concatenate(parts)

    return MicroBatch(
        input_ids=np.concatenate([row.input_ids for row in rows]).astype(np.int64)[None],
        position_ids=np.concatenate([np.arange(n) for n in lengths])[None],
        row_lengths=lengths,
        row_keys=np.array(keys, np.int64),
        target=np.concatenate([s + where for s, where in zip(starts, kept, strict=True)]),
        row=np.repeat(np.arange(len(rows)), [len(where) for where in kept]),
        turn=turn,
        turns=turns,
        mu=gather("rollout_logprobs"),
        advantage=gather("advantage"),
        temperature=gather("temperature"),
        version=gather("policy_version").astype(np.int64),
    )


def _number_turns(rows: Sequence[Row], kept: Sequence[Longs]) -> tuple[Longs, int]:
    """Turn numbers of all targets, from the recorded index: never from runs in a mask."""
    parts: list[Longs] = []
    turns = 0
    for row, where in zip(rows, kept, strict=True):
        unique, inverse = np.unique(row.turn_index[where], return_inverse=True)
        parts.append(inverse.astype(np.int64) + turns)
        turns += len(unique)
    return np.concatenate(parts), turns


def _filling() -> MicroBatch:
    longs, floats = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return MicroBatch(
        input_ids=np.zeros((1, 2), np.int64),
        position_ids=np.arange(2)[None],
        row_lengths=np.array([2]),
        row_keys=np.array([-1]),
        target=longs,
        row=longs,
        turn=longs,
        turns=0,
        mu=floats,
        advantage=floats,
        temperature=floats,
        version=longs,
    )


def cost(tokens: int) -> float:
    """Relative time of a row: linear layers, and attention that grows with its square."""
    return tokens + tokens * tokens / _QUADRATIC_TOKENS


def plan(lengths: Sequence[int], *, ranks: int, budget: int) -> list[list[list[int]]]:
    """Share rows out: [rank][micro-batch] -> row numbers; equally many micro-batches a rank.

    Rows go to the least loaded rank, longest first, and are packed first-fit-decreasing to
    `budget` tokens. Ranks that need fewer micro-batches get empty ones: collectives match.

    Raises:
        ValueError: a row is longer than the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > budget:
        raise ValueError(
            f"a row of {lengths[order[0]]} tokens exceeds tokens_per_micro_batch ({budget}):"
            " raise it, or set max_row_tokens"
        )
    loads = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in order:
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += cost(lengths[i])
    packed = [_first_fit(share, lengths, budget) for share in shares]
    most = max(1, *(len(bins) for bins in packed))
    return [bins + [[] for _ in range(most - len(bins))] for bins in packed]


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, left in enumerate(room):
            if lengths[i] <= left:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def pack(
    rows: Sequence[Row], *, ranks: int, budget: int, keys: Sequence[int] | None = None
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank, [rank][micro-batch]; `keys` default to the row numbers."""
    keys = range(len(rows)) if keys is None else keys
    return [
        [micro_batch([rows[i] for i in bin_], [keys[i] for i in bin_]) for bin_ in bins]
        for bins in plan([len(row) for row in rows], ranks=ranks, budget=budget)
    ]

"""One forward's worth of packed rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer
from numpy.typing import NDArray

from tracegrad_trainer.batches.expert_routing import UNROUTED, ExpertRouting
from tracegrad_trainer.batches.rows import Row, context_arrays

Longs = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

# Of each token in a row, and of each target in a micro-batch.
_OF_TARGETS = ("rollout_logprobs", "advantage", "temperature", "reward", "demonstration")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch:
    """One forward: T packed tokens of R rows, n of them targets (`loss_mask & keep`).

    `position_ids` restarts with each row. Arrays of n describe the targets only, in the order of
    the pack: `target` is a target's place in it, `source` the place of the token that it is
    predicted from. `row`, `turn`, `rollout` and `group` number what is in this micro-batch.
    `row_keys` number these rows in the batch; -1 is filling that carries no target.

    `turn_tokens`, `rollout_tokens` and `group_tokens` count the targets of the target's turn,
    rollout and group in the whole optimizer step: a turn is in one row, a rollout or a group may
    be in several micro-batches.

    `subtree_end`, where a row is a tree of branches: the place behind the last token that may
    attend to this one; None: every row is one sequence.

    `expert_routing`, of a mixture of experts: which ones a token goes to in each layer; -1: its
    router decides; None: the routers decide for all tokens.
    """

    input_ids: Int64[Longs, "1 tokens"]
    position_ids: Int64[Longs, "1 tokens"]
    subtree_end: Int64[Longs, " tokens"] | None
    row_lengths: Int64[Longs, " rows"]
    row_keys: Int64[Longs, " rows"]
    rollout_keys: Int64[Longs, " rows"]  # the same for a rollout's rows, in whatever micro-batch
    pair: Int64[Longs, " rows"]  # rows of one preference pair share a number; -1: none
    label: Int64[Longs, " rows"]  # 1 chosen, -1 rejected, 0 neither
    target: Int64[Longs, " n"]
    source: Int64[Longs, " n"]
    row: Int64[Longs, " n"]
    turn: Int64[Longs, " n"]
    turn_number: Int64[Longs, " n"]  # the turn's place in its rollout
    rollout: Int64[Longs, " n"]
    group: Int64[Longs, " n"]
    rollout_logprobs: Float32[Floats, " n"]
    advantage: Float32[Floats, " n"]
    reward: Float32[Floats, " n"]  # of turns: each at its last token
    score: Float32[Floats, " n"]  # the rollout's reward as it was given
    temperature: Float32[Floats, " n"]
    version: Int64[Longs, " n"]  # -1: a demonstration's
    demonstration: Bool[Bools, " n"]  # not sampled by a policy
    turn_tokens: Float32[Floats, " n"]
    rollout_tokens: Float32[Floats, " n"]
    rollout_sampled: Float32[Floats, " n"]  # of these the sampled ones
    group_tokens: Float32[Floats, " n"]
    group_sampled: Float32[Floats, " n"]
    expert_routing: Integer[ExpertRouting, "tokens routers k"] | None = None

    def __post_init__(self) -> None:
        tokens, targets, rows = int(self.row_lengths.sum()), len(self.target), len(self.row_lengths)
        assert self.input_ids.shape == self.position_ids.shape == (1, tokens)
        assert self.subtree_end is None or self.subtree_end.shape == (tokens,)
        assert self.expert_routing is None or len(self.expert_routing) == tokens
        for name in ROW_FIELDS:
            assert getattr(self, name).shape == (rows,), f"{name}: one entry a row"
        for name in TARGET_FIELDS:
            assert getattr(self, name).shape == (targets,), f"{name}: one entry a target"
        assert not targets or (self.source >= 0).all()
        assert (self.source < self.target).all()

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def turns(self) -> int:
        return _count(self.turn)

    @property
    def rollouts(self) -> int:
        return _count(self.rollout)

    @property
    def groups(self) -> int:
        return _count(self.group)

    def without_rows(self, keys: Collection[int]) -> tuple[MicroBatch, Bools]:
        """The micro-batch less the rows of these keys, and less those that they are paired with;
        which targets stay, bool[n]."""
        gone = np.isin(self.row_keys, list(keys))
        stay = ~(gone | (np.isin(self.pair, self.pair[gone]) & (self.pair >= 0)))
        targets = stay[self.row]
        if stay.all():
            return self, targets
        if not stay.any():
            return empty_micro_batch(), targets
        tokens = np.repeat(stay, self.row_lengths)
        place = np.cumsum(tokens) - 1
        changed: dict[str, Any] = {name: getattr(self, name)[targets] for name in TARGET_FIELDS}
        changed |= {name: getattr(self, name)[stay] for name in ROW_FIELDS}
        changed |= {name: place[changed[name]] for name in ("target", "source")}
        changed["row"] = (np.cumsum(stay) - 1)[changed["row"]]
        changed |= {name: _numbered(changed[name]) for name in ("turn", "rollout", "group")}
        if self.expert_routing is not None:
            changed["expert_routing"] = self.expert_routing[tokens]
        if self.subtree_end is not None:
            # Ends stand behind a row's last token: of what stays, that many come before.
            changed["subtree_end"] = np.cumsum([0, *tokens])[self.subtree_end[tokens]]
        return MicroBatch(
            **{
                "input_ids": self.input_ids[:, tokens],
                "position_ids": self.position_ids[:, tokens],
                "subtree_end": None,
                **changed,
            }
        ), targets


ROW_FIELDS = ("row_lengths", "row_keys", "rollout_keys", "pair", "label")
TARGET_FIELDS = tuple(
    field.name
    for field in fields(MicroBatch)
    if field.name not in ("input_ids", "position_ids", "subtree_end", "expert_routing", *ROW_FIELDS)
)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Of a whole optimizer step: the targets of each rollout (`Row.unit`) and of each group, and
    those of them that are no demonstration's."""

    rollout_tokens: Counter[str]
    rollout_sampled: Counter[str]
    group_tokens: Counter[str]
    group_sampled: Counter[str]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> StepCounts:
        counts = cls(Counter(), Counter(), Counter(), Counter())
        for row in rows:
            targets, sampled = int(row.keep.sum()), int((row.keep & ~row.demonstration).sum())
            counts.rollout_tokens[row.unit] += targets
            counts.rollout_sampled[row.unit] += sampled
            counts.group_tokens[row.group_id] += targets
            counts.group_sampled[row.group_id] += sampled
        return counts


def micro_batch(
    rows: Sequence[Row], keys: Sequence[int], counts: StepCounts | None = None
) -> MicroBatch:
    """Concatenate rows; without rows: the smallest forward, which has no target.

    `counts` are the whole step's; by default these rows are all.
    """
    if not rows:
        return empty_micro_batch()
    assert len(rows) == len(keys)
    counts = StepCounts.of(rows) if counts is None else counts
    lengths = np.array([len(row) for row in rows], np.int64)
    kept = [np.flatnonzero(row.keep) for row in rows]
    starts = np.cumsum(lengths) - lengths
    each = [len(where) for where in kept]
    turn = _number_turns(rows, kept)

    def of_targets(name: str) -> Any:
        return _joined([getattr(r, name)[where] for r, where in zip(rows, kept, strict=True)])

    def of_rows(values: Sequence[Any], dtype: Any) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype), each)

    return MicroBatch(
        **{name: of_targets(name) for name in _OF_TARGETS},
        input_ids=_joined([row.input_ids for row in rows]).astype(np.int64)[None],
        position_ids=_joined([row.positions for row in rows]).astype(np.int64)[None],
        subtree_end=_subtree_ends(rows, starts),
        row_lengths=lengths,
        row_keys=np.array(keys, np.int64),
        rollout_keys=np.array([_key(row.unit) for row in rows], np.int64),
        pair=np.array([row.pair for row in rows], np.int64),
        label=np.array([row.label for row in rows], np.int64),
        target=_joined([s + where for s, where in zip(starts, kept, strict=True)]),
        source=_joined(
            [s + r.predecessors[w] for s, r, w in zip(starts, rows, kept, strict=True)]
        ).astype(np.int64),
        row=np.repeat(np.arange(len(rows)), each),
        turn=turn,
        turn_number=_joined([row.target_turns for row in rows]).astype(np.int64),
        rollout=np.repeat(_numbers_of([row.unit for row in rows]), each),
        group=np.repeat(_numbers_of([row.group_id for row in rows]), each),
        score=of_rows([row.score for row in rows], np.float32),
        version=of_targets("policy_version").astype(np.int64),
        turn_tokens=np.bincount(turn)[turn].astype(np.float32),
        rollout_tokens=of_rows([counts.rollout_tokens[row.unit] for row in rows], np.float32),
        rollout_sampled=of_rows([counts.rollout_sampled[row.unit] for row in rows], np.float32),
        group_tokens=of_rows([counts.group_tokens[row.group_id] for row in rows], np.float32),
        group_sampled=of_rows([counts.group_sampled[row.group_id] for row in rows], np.float32),
        expert_routing=_routing(rows),
    )


def _key(unit: str) -> int:
    """A number for a name: the same on every rank, whatever else is there."""
    digest = hashlib.blake2b(unit.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def empty_micro_batch() -> MicroBatch:
    """The smallest forward. Ranks that need fewer micro-batches run it, for the collectives."""
    filling = Row(
        input_ids=np.zeros(2, np.int32),
        **context_arrays(2),
        rollout_id="",
        group_id="",
        turn_ids=(),
    )
    return replace(micro_batch([filling], [-1]), rollout_keys=np.array([-1]))


def _count(numbers: Longs) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0


def _numbered(values: Longs) -> Longs:
    """The same numbers without gaps."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _numbers_of(names: Sequence[str]) -> Longs:
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(name, len(seen)) for name in names], np.int64)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _number_turns(rows: Sequence[Row], kept: Sequence[Longs]) -> Longs:
    """Turn numbers of all targets, from the recorded index: never from runs in a mask."""
    parts: list[Longs] = []
    turns = 0
    for row, where in zip(rows, kept, strict=True):
        unique, inverse = np.unique(row.turn_index[where], return_inverse=True)
        parts.append(inverse.astype(np.int64) + turns)
        turns += len(unique)
    return np.concatenate(parts)


def _routing(rows: Sequence[Row]) -> ExpertRouting | None:
    known = next((row.expert_routing for row in rows if row.expert_routing is not None), None)
    if known is None:
        return None
    return _joined(
        [
            np.full((len(row), *known.shape[1:]), UNROUTED, known.dtype)
            if row.expert_routing is None
            else row.expert_routing
            for row in rows
        ]
    )


def _subtree_ends(rows: Sequence[Row], starts: Longs) -> Longs | None:
    if all(row.subtree_end is None for row in rows):
        return None
    return _joined(
        [
            start + (np.full(len(row), len(row)) if row.subtree_end is None else row.subtree_end)
            for row, start in zip(rows, starts, strict=True)
        ]
    ).astype(np.int64)

"""From a rollout's turn tree to training rows: one row a root-to-leaf path.

Two masks are kept apart. `loss_mask` says which tokens were sampled here (the capture); `keep`
says which of them the filters let through. What is trained is `loss_mask & keep`; nothing ever
writes into the first.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.records import Turn
from tracegrad.turns import paths

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class RolloutLike(Protocol):
    """What a row needs of a rollout; the store's `RolloutSample` has it."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def turns(self) -> Sequence[Turn]: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """T tokens of one rollout; entry t of every array describes token t as a *target*.

    The loss at t is -log p(input_ids[t] | what it attends to), so token 0 is never a target.
    `turn_ids` are the turns whose sampled tokens belong to this row, `turn_index` points into
    them. Tokens of an ancestor that an earlier row owns are context here, like the prompt.

    A row is one path, or, with `subtree_end`, a whole tree: its tokens depth first, each branch
    behind the tokens it continues. Token j is attended to by the tokens j <= i < subtree_end[j].
    """

    input_ids: Ints
    loss_mask: Bools  # sampled, and owned by this row
    keep: Bools  # what the filters leave of loss_mask
    rollout_logprobs: Floats  # as the serving engine recorded them; 0 on context
    policy_version: Ints  # -1 on context
    turn_index: Ints  # -1 on context
    temperature: Floats  # 1 on context
    advantage: Floats  # 0 on context
    reward: Floats  # given for the token: a turn's at its last one, the rollout's at its end
    expert: Bools  # an expert's token, not sampled by a policy
    rollout_id: str
    group_id: str
    turn_ids: tuple[str, ...]
    score: float = 0.0  # the rollout's reward as it was given
    pair: int = -1  # of a preference pair; its rows share a micro-batch
    label: int = 0  # 1 chosen, -1 rejected
    position: Ints | None = None  # [T]; None: 0, 1, 2, ...
    previous: Ints | None = None  # [T] the token that t is predicted from; None: t - 1
    subtree_end: Ints | None = None  # [T]

    def __post_init__(self) -> None:
        tokens = len(self.input_ids)
        for name in _PER_TOKEN:
            assert getattr(self, name).shape == (tokens,), f"{name} must have one entry a token"
        assert tokens > 0
        assert not self.loss_mask[0], "the first token has nothing to be predicted from"
        assert not bool((self.keep & ~self.loss_mask).any()), "filters only take away"

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def positions(self) -> Ints:
        return np.arange(len(self), dtype=np.int32) if self.position is None else self.position

    @property
    def predecessors(self) -> Ints:
        if self.previous is not None:
            return self.previous
        return np.arange(-1, len(self) - 1, dtype=np.int32)

    @property
    def kept_turn_ids(self) -> list[str]:
        """The turns this row trains, in order."""
        return [self.turn_ids[i] for i in np.unique(self.turn_index[self.keep])]


_PER_TOKEN = (
    "loss_mask",
    "keep",
    "rollout_logprobs",
    "policy_version",
    "turn_index",
    "temperature",
    "advantage",
    "reward",
    "expert",
)


def rows_of(
    rollout: RolloutLike,
    *,
    group_id: str,
    advantages: Sequence[float] | NDArray[np.float64],
    skipped: Collection[str] = (),
) -> list[Row]:
    """Rows of one rollout; `advantages` one a turn. Turns in `skipped` (ids) stay as context of
    turns that are trained.

    Every turn that is not skipped is trained in exactly one row: the first path that holds it.
    Branches without such a turn make no row, and a row ends with its last such turn.
    """
    values = {
        turn.turn_id: float(value) for turn, value in zip(rollout.turns, advantages, strict=True)
    }
    needed = _with_ancestors(rollout.turns, skipped)
    owned: set[str] = set()
    rows = []
    for path in paths(needed):
        own = {turn.turn_id for turn in path} - owned
        owned |= own
        rows.append(_row(path, own, rollout, group_id, values, skipped))
    return rows


def _with_ancestors(turns: Sequence[Turn], skipped: Collection[str]) -> list[Turn]:
    by_id = {turn.turn_id: turn for turn in turns}
    needed: set[str] = set()
    for turn in turns:
        current: Turn | None = None if turn.turn_id in skipped else turn
        while current is not None and current.turn_id not in needed:
            needed.add(current.turn_id)
            current = by_id.get(current.parent_id or "")
    return [turn for turn in turns if turn.turn_id in needed]


def _row(
    path: Sequence[Turn],
    own: Collection[str],
    rollout: RolloutLike,
    group_id: str,
    advantages: Mapping[str, float],
    skipped: Collection[str],
) -> Row:
    leaf = path[-1]
    ids = _ints(leaf.prompt_token_ids + leaf.completion_token_ids)
    tokens = len(ids)
    loss_mask = np.zeros(tokens, np.bool_)
    keep = np.zeros(tokens, np.bool_)
    mu = np.zeros(tokens, np.float32)
    version = np.full(tokens, -1, np.int32)
    index = np.full(tokens, -1, np.int32)
    temperature = np.ones(tokens, np.float32)
    advantage = np.zeros(tokens, np.float32)
    turn_ids: list[str] = []
    for turn in path:
        if turn.turn_id not in own:
            continue
        span = slice(start := len(turn.prompt_token_ids), start + len(turn.completion_token_ids))
        assert np.array_equal(ids[span], _ints(turn.completion_token_ids)), "not on this path"
        loss_mask[span] = True
        keep[span] = turn.turn_id not in skipped
        mu[span] = np.frombuffer(turn.completion_logprobs, np.float32)
        version[span] = _versions(turn)
        index[span] = len(turn_ids)
        temperature[span] = temperature_of(turn)
        advantage[span] = 0.0 if turn.turn_id in skipped else advantages[turn.turn_id]
        turn_ids.append(turn.turn_id)
    return Row(
        input_ids=ids,
        loss_mask=loss_mask,
        keep=keep,
        rollout_logprobs=mu,
        policy_version=version,
        turn_index=index,
        temperature=temperature,
        advantage=advantage,
        reward=np.zeros(tokens, np.float32),
        expert=np.zeros(tokens, np.bool_),
        rollout_id=rollout.rollout_id,
        group_id=group_id,
        turn_ids=tuple(turn_ids),
        score=rollout.reward,
    )


def temperature_of(turn: Turn) -> float:
    """The temperature the turn was sampled at; an engine's default is 1."""
    value = turn.sampling.get("temperature")
    return 1.0 if value is None else float(value)


def _ints(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int32) if len(values) else np.zeros(0, np.int32)


def _versions(turn: Turn) -> Ints:
    spans = np.asarray(turn.policy_versions, np.int32).reshape(-1, 2)
    return np.repeat(spans[:, 0], spans[:, 1])

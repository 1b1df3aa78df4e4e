"""From a rollout's turn tree to training rows: one row a root-to-leaf path.

Two masks are kept apart. `loss_mask` marks the tokens that were sampled here (the capture); `keep`
marks those of them that the filters let through. `loss_mask & keep` is trained; nothing ever
writes into the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer
from numpy.typing import NDArray

from tracegrad.events import Turn
from tracegrad.turn_tree import TurnTree
from tracegrad_trainer.batches.expert_routing import ExpertRouting, RoutingLayout, routing_of_path
from tracegrad_trainer.batches.turn_access import (
    Bools,
    Floats,
    Ints,
    RolloutLike,
    as_int_array,
    credited_rewards,
    is_demonstration,
    temperature_of,
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Row:
    """T tokens of one rollout; entry t of every array describes token t as a *target*.

    The loss at t is -log p(input_ids[t] | what it attends to), so token 0 is never a target.
    `turn_ids` are the turns whose sampled tokens belong to this row, `turn_index` points into
    them. Tokens of an ancestor that an earlier row owns are context here, like the prompt.

    A row is one path, or, with `subtree_end`, a whole tree: its tokens depth first, each branch
    behind the tokens it continues. Token j is attended to by the tokens j <= i < subtree_end[j].
    """

    input_ids: Int32[Ints, " tokens"]
    loss_mask: Bool[Bools, " tokens"]  # sampled, and owned by this row
    keep: Bool[Bools, " tokens"]  # what the filters leave of loss_mask
    # As the serving engine recorded them; 0 on context and demonstrations.
    rollout_logprobs: Float32[Floats, " tokens"]
    policy_version: Int32[Ints, " tokens"]  # -1 on context and demonstrations
    turn_index: Int32[Ints, " tokens"]  # -1 on context
    temperature: Float32[Floats, " tokens"]  # 1 on context
    advantage: Float32[Floats, " tokens"]  # 0 on context
    reward: Float32[Floats, " tokens"]  # of turns: each at its last token; the rollout's is `score`
    demonstration: Bool[Bools, " tokens"]  # not sampled by a policy
    rollout_id: str
    group_id: str
    turn_ids: tuple[str, ...]
    turn_numbers: tuple[int, ...] = ()  # their places in the rollout; (): 0, 1, 2, ...
    score: float = 0.0  # the rollout's reward as it was given
    pair: int = -1  # of a preference pair; its rows share a micro-batch
    label: int = 0  # 1 chosen, -1 rejected
    position: Int32[Ints, " tokens"] | None = None  # None: 0, 1, 2, ...
    # The token that t is predicted from; None: t - 1.
    previous: Int32[Ints, " tokens"] | None = None
    subtree_end: Int32[Ints, " tokens"] | None = None
    # Experts that it went to; -1: not known.
    expert_routing: Integer[ExpertRouting, "tokens routers k"] | None = None

    def __post_init__(self) -> None:
        tokens = len(self.input_ids)
        for name in PER_TOKEN:
            assert getattr(self, name).shape == (tokens,), f"{name} must have one entry a token"
        assert self.expert_routing is None or len(self.expert_routing) == tokens
        assert tokens > 0
        assert len(self.turn_numbers) in (0, len(self.turn_ids))
        assert not self.loss_mask[0], "the first token has nothing to be predicted from"
        assert not bool((self.keep & ~self.loss_mask).any()), "filters only take away"

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def unit(self) -> str:
        """What its rows are summed over: the rollout, and in each preference pair by itself."""
        return self.rollout_id if self.pair < 0 else f"{self.rollout_id} in pair {self.pair}"

    @property
    def target_turns(self) -> Ints:
        """Of each target the place of its turn in the rollout."""
        index = self.turn_index[self.keep]
        return np.array(self.turn_numbers, np.int32)[index] if self.turn_numbers else index

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
        trained = np.bincount(self.turn_index[self.keep], minlength=len(self.turn_ids))
        return [turn_id for turn_id, n in zip(self.turn_ids, trained, strict=True) if n]


# A row's arrays besides its tokens: dtype, and the value of tokens that are no targets.
PER_TOKEN: dict[str, tuple[Any, int]] = {
    "loss_mask": (np.bool_, False),
    "keep": (np.bool_, False),
    "rollout_logprobs": (np.float32, 0),
    "policy_version": (np.int32, -1),
    "turn_index": (np.int32, -1),
    "temperature": (np.float32, 1),
    "advantage": (np.float32, 0),
    "reward": (np.float32, 0),
    "demonstration": (np.bool_, False),
}


def context_arrays(tokens: int) -> dict[str, Any]:
    """A row's arrays where no token is a target."""
    return {name: np.full(tokens, context, dtype) for name, (dtype, context) in PER_TOKEN.items()}


@dataclass(frozen=True, eq=False)
class RowSource:
    """A rollout, its tree, and what is known of its turns when rows are made of them."""

    rollout: RolloutLike
    tree: TurnTree[Turn]
    group_id: str
    advantage: Sequence[float] | NDArray[np.float64]  # one a turn
    skipped: Collection[str] = ()  # turn ids
    layout: RoutingLayout | None = None  # of the expert routing that rows get; None: they get none

    @cached_property
    def trained(self) -> TurnTree[Turn]:
        """Turns that are trained, or continued by one that is."""
        return self.tree.without(self.skipped)

    @cached_property
    def reward(self) -> Mapping[str, float]:
        """Of turns, by id."""
        return credited_rewards(self.rollout, self.skipped)


class RowDraft:
    """A row while its turns are written into it."""

    def __init__(self, input_ids: Ints, source: RowSource) -> None:
        self.source = source
        self.input_ids = input_ids
        self.of_tokens = context_arrays(len(input_ids))
        self.expert_routing: ExpertRouting | None = None
        self.turn_ids: dict[str, int] = {}

    def write(self, turn: Turn, at: int, part: slice = slice(None)) -> None:
        """Tokens `part` of the turn's completion, which stand at `at`."""
        if not turn.prompt_token_ids:
            return  # what its first token was predicted from is not known: all is context
        number = self.turn_ids.setdefault(turn.turn_id, len(self.turn_ids))
        sampled = as_int_array(turn.completion_token_ids)[part]
        span = slice(at, at + len(sampled))
        assert np.array_equal(self.input_ids[span], sampled), "not on this path"
        of_tokens = self.of_tokens
        of_tokens["loss_mask"][span] = True
        of_tokens["turn_index"][span] = number
        if is_demonstration(turn):
            of_tokens["demonstration"][span] = True
        else:
            logprobs = np.frombuffer(turn.completion_logprobs, np.float32)
            of_tokens["rollout_logprobs"][span] = logprobs[part]
            of_tokens["policy_version"][span] = _versions(turn)[part]
            of_tokens["temperature"][span] = temperature_of(turn)
        if turn.turn_id not in self.source.skipped:
            place = self.source.tree.places[turn.turn_id]
            of_tokens["keep"][span] = True
            of_tokens["advantage"][span] = self.source.advantage[place]

    def give(self, turn: Turn, last: int) -> None:
        """The turn's reward at its last token."""
        self.of_tokens["reward"][last] += self.source.reward.get(turn.turn_id, 0.0)

    def row(self, **tree: Ints) -> Row:
        return Row(
            input_ids=self.input_ids,
            **self.of_tokens,
            rollout_id=self.source.rollout.rollout_id,
            group_id=self.source.group_id,
            turn_ids=tuple(self.turn_ids),
            turn_numbers=tuple(self.source.tree.places[turn_id] for turn_id in self.turn_ids),
            score=self.source.rollout.reward,
            expert_routing=self.expert_routing,
            **tree,  # type: ignore[arg-type]
        )


def rows_of(
    rollout: RolloutLike,
    *,
    group_id: str,
    advantages: Sequence[float] | NDArray[np.float64],
    skipped: Collection[str] = (),
    layout: RoutingLayout | None = None,
) -> list[Row]:
    """Rows of one rollout; `advantages` one a turn. Turns in `skipped` (ids) stay as context of
    turns that are trained. With a `layout` the rows have the expert routing that their turns have.

    Every turn that is not skipped is trained in exactly one row: the first path that holds it.
    Branches without such a turn make no row, and a row ends with its last such turn.
    """
    tree = TurnTree.of(rollout.turns)
    return path_rows(RowSource(rollout, tree, group_id, advantages, skipped, layout))


def path_rows(source: RowSource, paths: Iterable[Sequence[Turn]] | None = None) -> list[Row]:
    """A row for each path, by default for each that leads to a trained turn."""
    owned: set[str] = set()
    rows = []
    for path in source.trained.paths() if paths is None else paths:
        leaf = path[-1]
        draft = RowDraft(as_int_array(leaf.prompt_token_ids + leaf.completion_token_ids), source)
        if source.layout is not None:
            draft.expert_routing = routing_of_path(path, len(draft.input_ids), source.layout)
        for turn in path:
            if turn.turn_id in owned:
                continue
            owned.add(turn.turn_id)
            draft.write(turn, at := len(turn.prompt_token_ids))
            draft.give(turn, at + len(turn.completion_token_ids) - 1)
        rows.append(draft.row())
    return rows


def _versions(turn: Turn) -> Ints:
    spans = np.asarray(turn.policy_versions, np.int32).reshape(-1, 2)
    return np.repeat(spans[:, 0], spans[:, 1])

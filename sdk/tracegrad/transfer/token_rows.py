"""Token rows for other trainers: one a root-to-leaf path of a rollout's turn tree.

A turn's sampled tokens are in the mask of exactly one row, the first path that holds them; where
they come again they are context, like a prompt. A row ends with the last turn that it owns.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tracegrad.events import Turn, logprob_array
from tracegrad.turn_tree import TurnTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A sequence of T tokens. `mask` and `logprobs` have T entries too: 1 and what the engine
    returned where a token was sampled and belongs to this row, 0 elsewhere. The first
    `prompt_tokens` tokens
    are the prompt of the path's first turn. `turns` are those that the row owns, in order."""

    token_ids: array[int]
    mask: list[int]
    logprobs: array[float]
    prompt_tokens: int
    turns: tuple[Turn, ...]

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled, in order, each once."""
        return list(dict.fromkeys(v for turn in self.turns for v, _ in turn.policy_versions))


def token_rows(turns: Sequence[Turn], left_out: Collection[str] = ()) -> Iterator[TokenRow]:
    """`left_out` (turn ids) are owned by no row, and are context of turns that are."""
    owned: set[str] = set()
    for path in TurnTree.of(turns).without(left_out).paths():
        own = [t for t in path if t.turn_id not in owned and t.turn_id not in left_out]
        owned |= {turn.turn_id for turn in own}
        if own:
            yield _row(path, own)


def _row(path: Sequence[Turn], own: Sequence[Turn]) -> TokenRow:
    last = own[-1]
    ids = last.prompt_token_ids + last.completion_token_ids
    mask = [0] * len(ids)
    logprobs = logprob_array([0.0]) * len(ids)
    for turn in own:
        start = len(turn.prompt_token_ids)
        end = start + len(turn.completion_token_ids)
        assert ids[start:end] == turn.completion_token_ids, "a turn is on its path"
        mask[start:end] = [1] * (end - start)
        logprobs[start:end] = turn.completion_logprobs
    return TokenRow(
        token_ids=ids,
        mask=mask,
        logprobs=logprobs,
        prompt_tokens=len(path[0].prompt_token_ids),
        turns=tuple(own),
    )

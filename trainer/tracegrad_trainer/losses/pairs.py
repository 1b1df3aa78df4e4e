"""Which tokens belong to which preference pair."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tracegrad_trainer.losses.tokens import Tokens, segment_sum


@dataclass(frozen=True, slots=True, eq=False)
class PreferencePairs:
    """The pairs of a micro-batch, each numbered by its first row; of the other numbers, and of rows
    without a pair, none is whole.

    Whole is a pair that has targets of both labels. A row may have left the step because its
    numbers were not finite: what is left of its pair compares nothing, and is not counted.
    """

    of_token: Int[Tensor, " n"]
    side: Float[Tensor, " n"]  # 1 chosen, -1 rejected, 0 neither
    whole: Bool[Tensor, " rows"]


def pairs_of_tokens(tokens: Tokens) -> PreferencePairs:
    # Not by `unique`, for which a host would wait for its device.
    first = (tokens.pair[:, None] == tokens.pair[None]).int().argmax(1)
    of_token, side = first[tokens.row], tokens.label[tokens.row].to(tokens.policy_logprobs.dtype)
    chosen = segment_sum((side > 0).to(side.dtype), of_token, tokens.rows)
    rejected = segment_sum((side < 0).to(side.dtype), of_token, tokens.rows)
    return PreferencePairs(of_token, side, (tokens.pair >= 0) & (chosen > 0) & (rejected > 0))

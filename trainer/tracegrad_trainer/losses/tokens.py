"""What an objective sees of a micro-batch, and the arithmetic that its parts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

# Shapes of a micro-batch's n trained tokens.
PerToken = Float[Tensor, " n"]
TokenMask = Bool[Tensor, " n"]
TokenIndex = Int[Tensor, " n"]  # of the token's turn, row, rollout or pair, 0, 1, ...
PerRollout = Float[Tensor, " rollouts"]
PerSegment = Float[Tensor, " segments"]
Scalar = Float[Tensor, ""]

# exp of anything beyond is no use in fp32 and turns one odd token into inf.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokens:
    """The n trained tokens of a micro-batch. Three log-probability sets, kept apart.

    Only `policy_logprobs` (the policy being trained) and `value` carry a gradient;
    `old_logprobs` are the training engine's at the start of the batch, `rollout_logprobs` what the
    serving engine recorded: pi, old and mu in formulas. All at the temperature that the token was
    sampled with. A row is never split, a pair of rows neither; a rollout may be: what is summed
    over one is `rollout_sum`.
    """

    policy_logprobs: PerToken
    old_logprobs: PerToken
    rollout_logprobs: PerToken  # of an expert's tokens: nothing anybody recorded
    advantage: PerToken
    score: PerToken  # the rollout's reward as it was given
    version: Int[Tensor, " n"]
    demonstration: TokenMask
    turn: TokenIndex  # 0..turns-1, as row, rollout and group
    row: TokenIndex
    rollout: TokenIndex
    group: TokenIndex
    turns: int
    rows: int
    rollouts: int
    groups: int
    turn_tokens: PerToken  # targets of the token's turn, of its rollout and of its
    rollout_tokens: PerToken  # group, in the whole optimizer step
    group_tokens: PerToken
    rollout_sampled: PerToken  # of these the sampled ones, not an expert's
    group_sampled: PerToken
    pair: Int[Tensor, " rows"]
    label: Int[Tensor, " rows"]
    # What the objective asked for (`ObjectiveSettings.needs`), else None.
    reference_logprobs: PerToken | None = None
    value: PerToken | None = None  # with gradient
    old_value: PerToken | None = None
    returns: PerToken | None = None
    kto_z: Scalar | None = None
    entropy: PerToken | None = None  # of the policy; with gradient where it is a term
    # What `LossOutput.rollout_sums` add up to over the step; None: every rollout is whole here.
    rollout_sums: Sequence[Tensor] | None = None
    asked: list[Tensor] | None = None  # `compute_loss` notes here what parts sum over rollouts

    def __len__(self) -> int:
        return int(self.policy_logprobs.shape[0])

    @property
    def sampled(self) -> TokenMask:
        """Not an expert's: the tokens that ratios and mismatch are of."""
        return ~self.demonstration


def log_ratio(numerator: PerToken, denominator: PerToken) -> PerToken:
    """Their difference, clamped so that its exp is a finite number."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_mismatch(tokens: Tokens) -> PerToken:
    """log w = log old/mu of each token; 0 for an expert's, which have no mu."""
    return log_ratio(tokens.old_logprobs, tokens.rollout_logprobs).masked_fill(
        tokens.demonstration, 0.0
    )


def segment_sum(values: PerToken, segment: TokenIndex, segments: int) -> PerSegment:
    """Sum over the tokens of each segment (a turn, a row), by the numbers it was given.

    In double: a row may have tens of thousands of tokens, and they are added one after the other.
    """
    wide = values.double()
    return wide.new_zeros(segments).index_add(0, segment, wide).to(values.dtype)


def rollout_sum(values: PerToken, tokens: Tokens) -> PerRollout:
    """Sum over the tokens of each whole rollout, in all its rows: those in other micro-batches and
    on other ranks too. Without a gradient: what an objective sums over a rollout enters the
    gradient of its tokens as a number.

    `values` must not depend on another such sum, nor may it depend on them whether a part asks:
    an objective is evaluated once on what each micro-batch has, and once more on the totals.
    """
    wide = values.detach().double()
    total = wide.new_zeros(tokens.rollouts).index_add(0, tokens.rollout, wide)
    if tokens.asked is not None:
        tokens.asked.append(total)
        if tokens.rollout_sums is not None:
            total = tokens.rollout_sums[len(tokens.asked) - 1]
    return total.to(values.dtype)


def rollout_mean(values: PerToken, tokens: Tokens) -> PerRollout:
    """Mean over the sampled tokens of each whole rollout, as `rollout_sum`; 0 where none is."""
    count = rollout_sum(tokens.sampled.to(values.dtype), tokens)
    return rollout_sum(values.masked_fill(tokens.demonstration, 0.0), tokens) / count.clamp(min=1)


def segment_mean(
    values: PerToken, segment: TokenIndex, segments: int, counted: TokenMask
) -> PerSegment:
    """Mean over the counted tokens of each segment; 0 where none is."""
    total = segment_sum(values.masked_fill(~counted, 0.0), segment, segments)
    return total / segment_sum(counted.to(values.dtype), segment, segments).clamp(min=1)


@dataclass(frozen=True, slots=True, eq=False)
class PreferencePairs:
    """The pairs of a micro-batch, each numbered by its first row; of the other numbers, and of rows
    without a pair, none is whole.

    Whole is a pair that has targets of both labels. A row may have left the step because its
    numbers were not finite: what is left of its pair compares nothing, and is not counted.
    """

    of_token: TokenIndex
    side: PerToken  # 1 chosen, -1 rejected, 0 neither
    whole: Bool[Tensor, " rows"]


def pairs_of_tokens(tokens: Tokens) -> PreferencePairs:
    # Not by `unique`, for which a host would wait for its device.
    first = (tokens.pair[:, None] == tokens.pair[None]).int().argmax(1)
    of_token, side = first[tokens.row], tokens.label[tokens.row].to(tokens.policy_logprobs.dtype)
    chosen = segment_sum((side > 0).to(side.dtype), of_token, tokens.rows)
    rejected = segment_sum((side < 0).to(side.dtype), of_token, tokens.rows)
    return PreferencePairs(of_token, side, (tokens.pair >= 0) & (chosen > 0) & (rejected > 0))

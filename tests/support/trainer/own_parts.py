"""Parts of an objective as a user writes them, right and wrong; found by their import paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracegrad_trainer.losses import AdvantageMemory, ObjectiveSettings, RolloutRewards, Tokens


def own_advantage(
    rollouts: Sequence[RolloutRewards], settings: ObjectiveSettings, memory: AdvantageMemory
) -> list[Any]:
    return [np.full(len(r.tokens), r.reward * settings.options["times"]) for r in rollouts]


def one_rollout_too_few(
    rollouts: Sequence[RolloutRewards], settings: ObjectiveSettings, memory: AdvantageMemory
) -> list[Any]:
    return own_advantage(rollouts[1:], settings, memory)


def one_turn_too_many(
    rollouts: Sequence[RolloutRewards], settings: ObjectiveSettings, memory: AdvantageMemory
) -> list[Any]:
    return [np.ones(len(r.tokens) + 1) for r in rollouts]


def not_a_number(
    rollouts: Sequence[RolloutRewards], settings: ObjectiveSettings, memory: AdvantageMemory
) -> list[Any]:
    return [np.full(len(r.tokens), np.nan) for r in rollouts]


def own_ratio(tokens: Tokens, settings: ObjectiveSettings) -> Tensor:
    return (tokens.policy_logprobs - tokens.old_logprobs) * settings.options["times"]


def own_surrogate(
    tokens: Tokens, log_ratios: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    return -log_ratios * tokens.advantage, torch.zeros_like(tokens.demonstration)


def own_correction(tokens: Tokens, shared: Any, settings: ObjectiveSettings) -> Any:
    weight = shared(tokens.rollout_logprobs)
    return weight, weight > 0


def own_level(values: Tensor, tokens: Tokens, settings: ObjectiveSettings) -> Tensor:
    return values.mean().expand_as(values)


def own_aggregation(tokens: Tokens, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    return 3 * torch.ones_like(tokens.rollout_logprobs), tokens.rollout_logprobs.new_tensor(7.0)


def a_scalar(*anything: Any) -> Tensor:
    return torch.tensor(1.0)


def whole_numbers(tokens: Tokens, settings: ObjectiveSettings) -> Tensor:
    return tokens.turn


def alone(tokens: Tokens, *rest: Any) -> Tensor:
    return tokens.rollout_logprobs


def no_truths(tokens: Tokens, *rest: Any) -> tuple[Tensor, Tensor]:
    return tokens.rollout_logprobs, tokens.rollout_logprobs


def longest(group: Any) -> list[float]:
    return [float(len(rollout)) for rollout in group.rollouts]


def quiet(tokens: Tokens, ratio: Tensor, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    return ratio, torch.zeros_like(tokens.demonstration)


def telling(tokens: Tokens, ratio: Tensor, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    return ratio * settings.beta, torch.zeros_like(tokens.demonstration)


telling.reads = ("beta", "options")  # type: ignore[attr-defined]


def ranks(group: Any) -> list[float]:
    order = sorted(rollout.reward for rollout in group.rollouts)
    return [float(order.index(rollout.reward)) for rollout in group.rollouts]


NOTHING = 3

"""What every peer does in a step, and what it gets for it: the same numbers for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.trainer.rollouts import Attempt, Task
from tracegrad.turn_tree import TurnTree
from tracegrad_trainer.batches import rollout_rewards_of
from tracegrad_trainer.losses import compute_advantages, preset

OURS = "tracegrad"
PLAIN = "plain loop"
TRL_ROLLOUT = "TRL, a sequence a rollout"
TRL_CALL = "TRL, a row a call"
PEERS = (OURS, PLAIN, TRL_ROLLOUT, TRL_CALL)

# Of AdamW, which they all step with. So little that no step changes what the next one costs.
LR = 1e-6
BETAS = (0.9, 0.95)
# Gradients are compared as they are: nothing is clipped, but the norm is taken.
MAX_NORM = 1e9

# The clip of PPO over all tokens alike: the one formula that all of them have.
OBJECTIVE = preset("grpo", correction="none", clip_low=0.2, clip_high=0.2)


@dataclass(frozen=True)
class Work:
    """One optimizer step."""

    tasks: Sequence[Task]
    folder: Path  # of the model
    budget: int  # tokens of one forward of ours
    rows: int  # of one forward of TRL's

    @cached_property
    def attempts(self) -> list[Attempt]:
        return [attempt for task in self.tasks for attempt in task.rollouts]

    @cached_property
    def advantages(self) -> dict[str, float]:
        """By rollout: the same for each of its turns."""
        rollouts = [
            rollout_rewards_of(
                attempt, TurnTree.of(attempt.turns), group=number, task=task.group_id
            )
            for number, task in enumerate(self.tasks)
            for attempt in task.rollouts
        ]
        found = compute_advantages(OBJECTIVE, rollouts, {})
        return {r.rollout_id: float(v[0]) for r, v in zip(rollouts, found, strict=True)}

    @cached_property
    def tokens(self) -> int:
        """Those that are in no earlier turn: what each peer's speed is measured in."""
        return sum(attempt.tokens for attempt in self.attempts)

    @cached_property
    def sampled(self) -> int:
        """Those that are trained."""
        return sum(attempt.sampled for attempt in self.attempts)

    @cached_property
    def tokens_by_call(self) -> int:
        return sum(
            len(turn.prompt_token_ids) + len(turn.completion_token_ids)
            for attempt in self.attempts
            for turn in attempt.turns
        )


class Peer(ABC):
    """A training loop around a model of its own."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self) -> float:
        """One optimizer step -> the loss."""


def gradients(peer: Peer) -> tuple[float, dict[str, Tensor]]:
    """Do a step -> its loss, and by parameter the gradient that the optimizer was given."""
    found: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in peer.model.named_parameters():
            assert parameter.grad is not None
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name] = whole.detach().clone()

    hook = peer.optimizer.register_step_pre_hook(keep)
    try:
        loss = peer.step()
    finally:
        hook.remove()
    return loss, found


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of two gradients, relative to the second's length."""
    assert a.keys() == b.keys()
    apart = sum(float((a[name] - b[name]).double().square().sum()) for name in b)
    length = sum(float(b[name].double().square().sum()) for name in b)
    return float((apart / length) ** 0.5)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.0, foreach=True
    )

"""A table of logits that learns to say even numbers: all of an objective, and nothing else.

Each of 8 tasks asks for two turns of two tokens out of 8; the reward is 1 for at least three even
ones. A batch is trained on four times, so that pi is not old after the first, and mu is not quite
old. `sft` is given the successes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracegrad_trainer.losses import (
    ObjectiveSettings,
    RolloutRewards,
    Tokens,
    compute_advantages,
    compute_loss,
)
from tracegrad_trainer.losses.gae import gae

TASKS, ROLLOUTS, LENGTH, WORDS = 8, 8, 4, 8
TURN = torch.tensor([0, 0, 1, 1])


@dataclass
class Policy:
    """Logits of every token of every task, and what each is worth."""

    logits: Tensor
    value: Tensor

    @classmethod
    def fresh(cls, seed: int) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((TASKS, LENGTH, WORDS), generator=generator).double() * 0.3
        return cls(logits.requires_grad_(), torch.zeros(TASKS, LENGTH).double().requires_grad_())

    def logp(self, task: Tensor, said: Tensor) -> Tensor:
        """[rollouts, LENGTH]"""
        return self.logits.log_softmax(-1)[task].gather(-1, said[..., None])[..., 0]

    @torch.no_grad()
    def reward(self) -> float:
        """Its expectation, exactly."""
        even = self.logits.softmax(-1)[..., ::2].sum(-1)
        odd = 1 - even
        all_even = even.prod(-1)
        one_odd = sum(
            odd[:, i] * even[:, [j for j in range(LENGTH) if j != i]].prod(-1)
            for i in range(LENGTH)
        )
        return float((all_even + one_odd).mean())


def learn(
    settings: ObjectiveSettings,
    seed: int,
    *,
    steps: int = 10,
    lr: float = 0.15,
    shuffled: bool = False,
) -> tuple[float, float]:
    """Expected reward before and after."""
    policy, generator = Policy.fresh(seed), torch.Generator().manual_seed(seed)
    reference = policy.logits.detach().clone()
    optimizer = torch.optim.Adam([policy.logits, policy.value], lr=lr)
    memory: dict[str, Any] = {}
    before = policy.reward()
    for _ in range(steps):
        task = torch.arange(TASKS).repeat_interleave(ROLLOUTS)
        with torch.no_grad():
            chances = policy.logits.softmax(-1)[task].reshape(-1, WORDS)
            said = torch.multinomial(chances, 1, generator=generator).reshape(-1, LENGTH)
        rewards = ((said % 2 == 0).sum(1) >= 3).double()
        if shuffled:
            rewards = rewards[torch.randperm(len(rewards), generator=generator)]
        if settings.surrogate == "sft":
            task, said, rewards = (x[rewards > 0] for x in (task, said, rewards))
        batch = prepare(settings, policy, reference, task, said, rewards, memory, generator)
        for _ in range(4):
            optimizer.zero_grad()
            done = compute_loss(settings, now(policy, task, said, batch))
            if done.units > 0:
                (done.total / done.units).backward()
                optimizer.step()
    return before, policy.reward()


@torch.no_grad()
def prepare(
    settings: ObjectiveSettings,
    policy: Policy,
    reference: Tensor,
    task: Tensor,
    said: Tensor,
    rewards: Tensor,
    memory: dict[str, Any],
    generator: torch.Generator,
) -> dict[str, Any]:
    """What is fixed for a batch; entries of rollouts [r] or of their tokens [r, LENGTH]."""
    found = compute_advantages(settings, scored(task, said, rewards), memory)
    advantage = torch.from_numpy(np.stack(found))[:, TURN]
    old = policy.logp(task, said)
    value = policy.value[task]
    returns = torch.zeros_like(value)
    if "value" in settings.needs:
        given = torch.zeros_like(value)
        given[:, -1] = rewards
        row = torch.arange(len(task)).repeat_interleave(LENGTH)
        flat = gae(
            value.flatten(),
            given.flatten(),
            row,
            gamma=settings.gamma,
            lam=settings.gae_lambda,
        )
        advantage, returns = (x.reshape(value.shape) for x in flat)
    if settings.whitens:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    pair, label = preferences(task, rewards)
    noise = torch.randn(old.shape, generator=generator).double() * 0.02
    return {
        "advantage": advantage,
        "old_logprobs": old,
        "rollout_logprobs": old + noise,
        "reference_logprobs": reference.log_softmax(-1)[task].gather(-1, said[..., None])[..., 0],
        "old_value": value.clone(),
        "returns": returns,
        "score": rewards[:, None].expand(-1, LENGTH),
        "pair": pair,
        "label": label,
    }


def preferences(task: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Successes are paired with failures of their group; what is left over has no pair."""
    pair = torch.full((len(task),), -1)
    for number in range(TASKS):
        good = torch.nonzero((task == number) & (rewards > 0))[:, 0]
        bad = torch.nonzero((task == number) & (rewards == 0))[:, 0]
        for i, (a, b) in enumerate(zip(good.tolist(), bad.tolist(), strict=False)):
            pair[[a, b]] = number * ROLLOUTS + i
    return pair, torch.where(rewards > 0, 1, -1)


def scored(task: Tensor, said: Tensor, rewards: Tensor) -> list[RolloutRewards]:
    return [
        RolloutRewards(
            rollout_id=str(i),
            task=str(number),
            agent="",
            group=number,
            reward=float(rewards[i]),
            turn_rewards=np.zeros(2),
            tokens=np.array([2, 2]),
            parents=np.array([-1, 0]),
            states=[bytes([number]), bytes([number, *said[i, :2].tolist()])],
        )
        for i, number in enumerate(task.tolist())
    ]


def now(policy: Policy, task: Tensor, said: Tensor, batch: dict[str, Any]) -> Tokens:
    """The batch's tokens as they stand, a row a rollout. Texts to imitate are the successes."""
    count = len(task)
    row = torch.arange(count).repeat_interleave(LENGTH)
    ones = torch.ones(count * LENGTH, dtype=torch.float64)
    logp = policy.logp(task, said)
    flat = {name: x.flatten() for name, x in batch.items() if name not in ("pair", "label")}
    gain = (logp.detach() - batch["reference_logprobs"]).sum(1)
    return Tokens(
        policy_logprobs=logp.flatten(),
        version=torch.ones(count * LENGTH, dtype=torch.int64),
        demonstration=torch.zeros(count * LENGTH, dtype=torch.bool),
        turn=(2 * torch.arange(count)[:, None] + TURN).flatten(),
        row=row,
        rollout=row,
        group=task[row],
        turns=2 * count,
        rows=count,
        rollouts=count,
        groups=TASKS,
        turn_tokens=2 * ones,
        rollout_tokens=LENGTH * ones,
        rollout_sampled=LENGTH * ones,
        group_tokens=torch.bincount(task[row])[task[row]].to(ones),
        group_sampled=torch.bincount(task[row])[task[row]].to(ones),
        pair=batch["pair"],
        label=batch["label"],
        value=policy.value[task].flatten(),
        kto_z=gain.mean().clamp(min=0),
        **flat,
    )

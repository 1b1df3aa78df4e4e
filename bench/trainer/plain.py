"""The plainest loop that is right: a rollout at a time, all logits, autograd, AdamW."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.trainer.rollouts import Attempt
from bench.trainer.work import MAX_NORM, OBJECTIVE, PLAIN, Peer, Work, adamw


class Plain(Peer):
    name = PLAIN

    def __init__(self, work: Work) -> None:
        self.work = work
        self.model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32)
        self.optimizer = adamw(self.model)

    def step(self) -> float:
        total = 0.0
        self.optimizer.zero_grad()
        for attempt in self.work.attempts:
            ids, sampled = sequence(attempt)
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logp = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[sampled[1:], 0]
            ratio = torch.exp(logp - logp.detach())
            advantage = self.work.advantages[attempt.rollout_id]
            low, high = 1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            loss = -surrogate.sum() / self.work.sampled
            torch.autograd.backward(loss)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return total


def sequence(attempt: Attempt) -> tuple[Tensor, Tensor]:
    """A rollout's tokens, i64[T], and which of them were sampled, bool[T]."""
    last = attempt.turns[-1]
    ids = torch.from_numpy(np.array(last.prompt_token_ids + last.completion_token_ids)).long()
    sampled = torch.zeros(len(ids), dtype=torch.bool)
    for turn in attempt.turns:
        start = len(turn.prompt_token_ids)
        sampled[start : start + len(turn.completion_token_ids)] = True
    return ids, sampled

"""Rollouts in this process: the policy plays vaults, and what it did becomes events in the store.

The serving side in small: a copy of the weights, whose log-probabilities at the temperature of
sampling are what an engine would record (mu).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    new_id,
    token_id_array,
)
from tracegrad.store.anchors.anchor_store import RolloutFromAnchor

from . import words
from .vault import Expert, ReplayDiverged, Vault

Reply = tuple[list[int], list[float]]  # tokens, and the log-probability of each


class Policy:
    """What serves. `load` is the push."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._generator = torch.Generator().manual_seed(seed)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._model.load_state_dict({name: tensor.clone() for name, tensor in tensors})

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]]) -> list[Reply]:
        """One reply to each prompt: up to the end token, or as long as a call may be."""
        replies: list[Reply] = [([], []) for _ in prompts]
        for _ in range(words.LONGEST_CALL):
            going = [i for i, (ids, _) in enumerate(replies) if words.ID[words.END] not in ids]
            if not going:
                break
            chances = self._next([[*prompts[i], *replies[i][0]] for i in going])
            chosen = torch.multinomial(chances.exp(), 1, generator=self._generator)
            for i, token, logp in zip(
                going, chosen[:, 0].tolist(), chances.gather(1, chosen)[:, 0].tolist(), strict=True
            ):
                replies[i][0].append(token)
                replies[i][1].append(logp)
        return replies

    def _next(self, texts: Sequence[list[int]]) -> Tensor:
        """Log-probabilities [texts, vocabulary]. Padding lies behind every token that counts."""
        lengths = torch.tensor([len(text) for text in texts])
        longest = int(lengths.max())
        padded = torch.tensor([t + [words.ID[words.PAD]] * (longest - len(t)) for t in texts])
        hidden = self._model.model(input_ids=padded, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(texts)), lengths - 1]
        scores: Tensor = self._model.lm_head(last).log_softmax(-1)
        return scores

    def any_call(self) -> Reply:
        """A call at random, as likely as any other: what exploring turns are sampled from."""
        calls = list(words.CALLS)
        chosen = calls[int(torch.randint(len(calls), (1,), generator=self._generator))]
        return words.said(words.CALLS[chosen]), [-math.log(len(calls)), 0.0]


@dataclass(slots=True)
class Attempt:
    """One rollout from an anchor of the expert's."""

    expert: Expert
    anchor: int
    version: int
    tags: dict[str, str]
    explores: bool = False  # its first turn is a call at random
    opened: RolloutFromAnchor | None = None  # the store has the rollout, with the expert's turns
    rollout_id: str = field(default_factory=new_id)
    ids: list[int] = field(default_factory=list)  # the conversation so far
    turns: list[Turn] = field(default_factory=list)
    failure: Outcome | None = None  # one that is not the policy's
    vault: Vault = field(init=False)

    def __post_init__(self) -> None:
        if self.opened is not None:
            self.rollout_id = self.opened.rollout_id
        self.vault = Vault(self.expert.vault, len(self.expert.calls))
        self.ids = words.asked(self.vault.state)
        prefix = slice(0, self.anchor)
        calls, seen = self.expert.calls[prefix], self.expert.seen[prefix]
        try:
            self.vault.reset(calls, seen)
        except ReplayDiverged:
            self.failure = Outcome.ENV_ERROR
            return
        for call, observation in zip(calls, seen, strict=True):
            reply = words.said(call)
            self._took(
                (reply, [0.0] * len(reply)), version=-1, sampling={"source": "demonstration"}
            )
            self.ids += words.seen(observation)
        if self.opened is not None:
            self.turns = self.opened.turns[: self.anchor]

    @property
    def going(self) -> bool:
        return self.failure is None and not self.vault.done

    def took(self, reply: Reply, *, version: int) -> None:
        """A turn of that policy version's (-1: none's), and the environment's."""
        self._took(reply, version=version, sampling={"temperature": 1.0})
        observation = self.vault.call(words.heard(reply[0]))
        if not self.vault.done:
            self.ids += words.seen(observation)

    def _took(self, reply: Reply, *, version: int, sampling: dict[str, Any]) -> None:
        ids, logps = reply
        self.turns.append(  # a conversation: each goes on from the one before it
            Turn(
                rollout_id=self.rollout_id,
                parent_id=self.turns[-1].turn_id if self.turns else None,
                dialect="completions",
                model="vault",
                prompt_token_ids=token_id_array(self.ids),
                completion_token_ids=token_id_array(ids),
                completion_logprobs=logprob_array(logps),
                policy_versions=((version, len(ids)),),
                sampling=sampling,
                finish_reason="stop",
            )
        )
        self.ids += ids

    def events(self, reward: float) -> list[Event]:
        """What the store does not have yet."""
        begun: list[Event] = []
        if self.opened is None:
            opened = RolloutStarted(
                rollout_id=self.rollout_id,
                task_id=self.expert.vault,
                agent="vaults",
                tags=self.tags,
            )
            begun = [opened, *self.turns[: self.anchor]]
        end = RolloutFinished(rollout_id=self.rollout_id, outcome=self.failure or Outcome.COMPLETED)
        given: list[Event] = []
        if self.failure is None:
            given = [Reward(rollout_id=self.rollout_id, value=reward, source="vault")]
        return [*begun, *self.turns[self.anchor :], *given, end]


def play(policy: Policy, attempts: Sequence[Attempt]) -> None:
    """All of them to their ends, side by side."""
    for attempt in attempts:
        if attempt.explores and attempt.going:
            attempt.took(policy.any_call(), version=-1)
    while going := [attempt for attempt in attempts if attempt.going]:
        replies = policy.sample([attempt.ids for attempt in going])
        for attempt, reply in zip(going, replies, strict=True):
            attempt.took(reply, version=attempt.version)

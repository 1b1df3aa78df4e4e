"""Made-up rollouts, rows and a tiny model for the trainer's tests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.trainer.tiny_model import tiny_qwen3
from tracegrad.events import Turn
from tracegrad_trainer.batches import Row

VOCABULARY = 61
POISON = VOCABULARY - 1  # a token that no ordinary row holds


@dataclass
class Sample:
    rollout_id: str
    reward: float
    turns: list[Turn] = field(default_factory=list)


@dataclass
class Group:
    group_id: str
    rollouts: list[Sample]


def turn(
    turn_id: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    parent: Turn | None = None,
    version: int = 1,
    **changes: Any,
) -> Turn:
    """A turn; with a parent its prompt is the parent's tokens and then `prompt`."""
    before = parent.prompt_token_ids + parent.completion_token_ids if parent else array("i")
    arguments: dict[str, Any] = {
        "turn_id": turn_id,
        "rollout_id": "r",
        "parent_id": parent.turn_id if parent else None,
        "dialect": "chat",
        "model": "m",
        "prompt_token_ids": before + array("i", prompt),
        "completion_token_ids": array("i", completion),
        "completion_logprobs": array("f", [-0.1 * (i + 1) for i in range(len(completion))]),
        "policy_versions": ((version, len(completion)),) if completion else (),
    }
    return Turn(**(arguments | changes))


def next_turn(
    rollout_id: str,
    turns: Sequence[Turn],
    prompt: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float],
    **changes: Any,
) -> Turn:
    """The turn that continues the last of `turns`, at whose tokens its own prompt begins; sampled
    by the model folder's weights."""
    return turn(
        f"{rollout_id}.{len(turns)}",
        prompt,
        sampled,
        parent=turns[-1] if turns else None,
        version=0,
        **{"rollout_id": rollout_id, "completion_logprobs": array("f", logprobs), **changes},
    )


def rows(count: int, *, seed: int = 0, longest: int = 40) -> list[Row]:
    """Random rows of two turns each, mixed versions, advantages and temperatures."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        tokens = int(rng.integers(12, longest))
        mask = np.zeros(tokens, np.bool_)
        index = np.full(tokens, -1, np.int32)
        cut = tokens // 2
        for number, span in enumerate((slice(2, cut - 1), slice(cut + 1, tokens))):
            mask[span] = True
            index[span] = number
        made.append(
            Row(
                input_ids=rng.integers(0, VOCABULARY - 1, tokens).astype(np.int32),
                loss_mask=mask,
                keep=mask.copy(),
                rollout_logprobs=np.where(mask, rng.normal(-4, 0.5, tokens), 0).astype(np.float32),
                policy_version=np.where(mask, 3 - (i % 2), -1).astype(np.int32),
                turn_index=index,
                temperature=np.where(mask, 1.0 if i % 3 else 0.7, 1).astype(np.float32),
                advantage=np.where(mask, rng.normal(), 0).astype(np.float32),
                reward=np.zeros(tokens, np.float32),
                demonstration=np.zeros(tokens, np.bool_),
                rollout_id=f"r{i}",
                group_id=f"g{i // 2}",
                turn_ids=(f"r{i}.0", f"r{i}.1"),
            )
        )
    return made


def tiny_model(folder: Path, *, seed: int = 0, tied: bool = False, poisoned: bool = False) -> Path:
    """A Qwen3 of two layers with grouped heads, weights wide enough to tell tokens apart."""
    model = tiny_qwen3(VOCABULARY, seed=seed, tie_word_embeddings=tied)
    if poisoned:  # a row that holds this token is not a number throughout
        model.model.embed_tokens.weight.data[POISON] = float("nan")
    model.save_pretrained(folder)
    return folder

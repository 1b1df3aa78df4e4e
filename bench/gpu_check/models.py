"""Models and rows of the checks: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from tracegrad_trainer.batches import Row


@dataclass(frozen=True, slots=True)
class Size:
    name: str
    config: dict[str, int]
    rows: tuple[int, ...]  # tokens of each
    budget: int  # of a micro-batch

    def config_of(self) -> Qwen3Config:
        return Qwen3Config(**self.config, tie_word_embeddings=True, max_position_embeddings=65536)


_ROWS = (4096, 3072, 3072, 2048, 2048, 1024, 512, 512)  # 16k tokens
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
LARGE = Size(
    "0.6B",
    {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        **_HEADS,
    },
    rows=_ROWS,
    budget=16384,
)
LARGER = Size(
    "1.7B",
    {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        **_HEADS,
    },
    rows=_ROWS,
    budget=16384,
)
TINY = Size(
    "tiny",
    {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    rows=(40, 30, 20, 10),
    budget=100,
)


def random_model(size: Size, attention: str, device: torch.device | str = "cpu") -> nn.Module:
    """Drawn where it will be: on a host a billion numbers take longer than the steps."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            size.config_of(), dtype=torch.float32, attn_implementation=attention
        )
    return model


def random_rows(lengths: Sequence[int], vocabulary: int) -> list[Row]:
    """One turn each, of which all but the first token is trained."""
    rng = np.random.default_rng(0)
    made = []
    for i, tokens in enumerate(lengths):
        mask = np.arange(tokens) > 0
        zeros = np.zeros(tokens, np.float32)
        # Near what a random model says: further off every ratio to it is at its bound.
        uniform = np.full(tokens, -np.log(vocabulary), np.float32)
        made.append(
            Row(
                input_ids=rng.integers(0, vocabulary, tokens).astype(np.int32),
                loss_mask=mask,
                keep=mask,
                rollout_logprobs=uniform,
                policy_version=np.where(mask, 0, -1).astype(np.int32),
                turn_index=np.where(mask, 0, -1).astype(np.int32),
                temperature=zeros + 1,
                advantage=np.where(mask, 1 - 2 * (i % 2), 0).astype(np.float32),
                reward=zeros,
                demonstration=np.zeros(tokens, np.bool_),
                rollout_id=str(i),
                group_id="0",
                turn_ids=(str(i),),
            )
        )
    return made


def forked(row: Row) -> Row:
    """The row as a tree: a stem of a third of its tokens, and two branches."""
    from dataclasses import replace

    tokens = len(row)
    stem, fork = tokens // 3, 2 * tokens // 3
    previous = np.arange(-1, tokens - 1, dtype=np.int32)
    previous[fork] = stem - 1
    position = np.arange(tokens, dtype=np.int32)
    position[fork:] -= fork - stem
    ends = np.full(tokens, tokens, np.int32)
    ends[stem:fork] = fork
    return replace(row, position=position, previous=previous, subtree_end=ends)

"""The model that all train: a Qwen3 with random weights, large enough that products dominate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Size:
    vocabulary: int
    hidden: int
    layers: int

    @property
    def words(self) -> str:
        return (
            f"a Qwen3 of {self.layers} layers, {self.hidden} wide, with {self.vocabulary:,} tokens,"
            f" {self.parameters / 1e6:.1f} million weights"
        )

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(_config(self))
        return sum(parameter.numel() for parameter in model.parameters())


SIZE = Size(8_192, 256, 4)
TINY = Size(512, 64, 2)


def write_model(size: Size, folder: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(_config(size)).save_pretrained(folder)
    return folder


def _config(size: Size) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 64,
        head_dim=32,
        max_position_embeddings=4_096,
        tie_word_embeddings=False,
    )

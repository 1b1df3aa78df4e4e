"""Where vLLM and the ranks are placed: a table of models and machines, and what always holds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tracegrad_trainer.config.trainer import TrainerSettings, load_settings
from tracegrad_trainer.launch import placement
from tracegrad_trainer.launch.machine import GIB, Gpu, Machine
from tracegrad_trainer.launch.model_sizes import model_sizes
from tracegrad_trainer.launch.placement import (
    DoesNotFitError,
    ModelSizes,
    PlacementRequest,
    RankMemory,
    place,
    place_training,
)

CONFIGS: dict[str, Any] = {
    "0.6B": (Qwen3Config, (1024, 3072, 28, 16, 8, 151_936, True)),
    "1.7B": (Qwen3Config, (2048, 6144, 28, 16, 8, 151_936, True)),
    "8B": (Qwen3Config, (4096, 12_288, 36, 32, 8, 151_936, False)),
    "32B": (Qwen3Config, (5120, 25_600, 64, 64, 8, 151_936, False)),
    "70B": (LlamaConfig, (8192, 28_672, 80, 64, 8, 128_256, False)),
    "235B-A22B": (Qwen3MoeConfig, (4096, 12_288, 94, 64, 4, 151_936, False)),
}
# What is open while they train: half precision, blocks recomputed, 16k tokens a call.
SETS = (
    "vllm.device=cuda",
    "vllm.max_model_len=16384",
    "fsdp.compute_dtype=bfloat16",
    "fsdp.gradient_checkpointing=true",
)


def meta(name: str) -> torch.nn.Module:
    kind, (hidden, inner, layers, heads, kv_heads, vocabulary, tied) = CONFIGS[name]
    changes: dict[str, Any] = {}
    if name == "235B-A22B":
        changes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    config = kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
        **changes,
    )
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (made / name).write_text("{}")
    return made


def settings_of(folder: Path, *sets: str) -> TrainerSettings:
    return load_settings(None, [f"model={folder}", f"state_dir={folder}/state", *SETS, *sets])


@cache
def sizes_of(folder: Path, name: str, lora: bool) -> ModelSizes:
    settings = settings_of(folder, *(["fsdp.lora.rank=32"] if lora else []))
    return model_sizes(meta(name), settings, gpus=8)


def machine(count: int, gib: float, host: int = 4096) -> Machine:
    total = int(gib * GIB)
    return Machine(tuple(Gpu(i, "fake", total, total) for i in range(count)), host * GIB)


def plan(sizes: ModelSizes, of: Machine, **request: Any) -> placement.Placement:
    return place(of, sizes, PlacementRequest(**request))


def words(sizes: ModelSizes, of: Machine) -> str:
    """`6+2 tp1`: six GPUs serve and two train; `8 shared tp8`; `no`."""
    try:
        found = plan(sizes, of)
    except DoesNotFitError:
        return "no"
    serving, training = len(found.engine_gpus), len(found.train_gpus)
    if found.shared:
        return f"{training} shared tp{found.tensor_parallel}"
    return f"{serving}+{training} tp{found.tensor_parallel}"


TABLE: dict[tuple[str, bool, int], str] = {}


if __name__ == "__main__":
    import sys
    import tempfile

    made = Path(tempfile.mkdtemp())
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (made / name).write_text("{}")
    for name in CONFIGS:
        for lora in (False, True):
            sizes = sizes_of(made, name, lora)
            for gib in (24, 80, 141):
                row = [words(sizes, machine(n, gib)) for n in (1, 2, 4, 8)]
                print(name, lora, gib, row)
            for n, g in ((1, 24), (8, 80)):
                try:
                    plan(sizes, machine(n, g))
                except DoesNotFitError as e:
                    print("   ", n, g, str(e)[:900])

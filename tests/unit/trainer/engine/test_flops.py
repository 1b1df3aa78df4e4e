"""What a step's operations are counted and measured by, for models and devices of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    MistralConfig,
    Qwen3Config,
)

from support.trainer.row_samples import rows
from support.trainer.tiny_model import tiny_sizes
from support.trainer.tiny_models import make
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.flops import attention_parity, exchange_share, flops
from tracegrad_trainer.engine.model import memory
from tracegrad_trainer.engine.model.hf_config import experts_per_token
from tracegrad_trainer.engine.peak_flops import peak_flops

CUDA = torch.device("cuda")


def gemma4(**changes: Any) -> Any:
    """Its full layers have wider heads and fewer keys than its sliding ones. Without storage."""
    layers = ["sliding_attention", "full_attention"]
    wide = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    sizes = tiny_sizes(61, head_dim=8, layer_types=layers, pad_token_id=0, **wide, **changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Gemma4TextConfig(**sizes))


def test_a_mixture_may_name_its_experts_otherwise() -> None:
    batch = micro_batch(rows(2), range(2))
    mixture = {"enable_moe_block": True, "num_experts": 8, "moe_intermediate_size": 16}

    def used(count: int) -> float:
        model = gemma4(**mixture, top_k_experts=count)
        assert experts_per_token(model.config) == count
        return flops(model, batch)

    # Each expert of two layers: three matrices of 32 x 16, six operations a weight and token.
    assert used(4) - used(2) == pytest.approx(2 * 2 * 3 * 32 * 16 * 6 * batch.tokens)


def test_no_kind_of_embedding_is_multiplied_with() -> None:
    """Of tokens, again for each layer (Gemma 4), of positions (GPT-2): they are looked up."""
    batch = micro_batch(rows(2), range(2))
    few, many = (gemma4(vocab_size_per_layer_input=n) for n in (61, 610))
    assert flops(few, batch) == flops(many, batch)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4}
    short, long = (
        AutoModelForCausalLM.from_config(GPT2Config(n_positions=n, **sizes)) for n in (128, 256)
    )
    assert flops(short, batch) == flops(long, batch)


def test_layers_of_one_model_may_differ() -> None:
    """Whose config, asked for the width of its heads, raises an error of its own."""
    model = gemma4()
    (row,) = rows(1)
    one, twice = micro_batch([row], [0]), micro_batch([row], [0])
    twice.position_ids[:] = 2 * twice.position_ids + 1
    # Forward and backward: 12 operations a head's width and token seen; 4 heads of 8, 4 of 16.
    seen = float((one.position_ids + 1).sum())
    assert flops(model, twice) - flops(model, one) == pytest.approx(12 * 4 * (8 + 16) * seen)
    found = memory.estimate_memory(model, FsdpSettings(device="cpu"), ranks=1, tokens=1)
    kept = [8 * 32 + 4 * heads + 4 * 48 for heads in (8 * (4 + 2 * 2), 16 * (4 + 2 * 1))]
    assert found.activations == 4 * sum(kept)


def test_a_window_is_all_that_its_layers_see() -> None:
    """Of a layer with a window of four, four; of the full one beside it, all."""
    (row,) = rows(1)
    batch = micro_batch([row], [0])
    before = batch.position_ids + 1
    full, sliding = float(before.sum()), float(before.clip(max=4).sum())
    found = flops(gemma4(sliding_window=10_000), batch) - flops(gemma4(sliding_window=4), batch)
    assert found == pytest.approx(12 * 4 * 8 * (full - sliding))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        # Others whose names have a known one's in them.
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H20", None),
        ("Tesla T4", None),
    ],
)
def test_a_device_s_peak_is_its_own(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(CUDA, torch.bfloat16) == peak


def test_nothing_is_said_of_what_a_maker_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_flops(CUDA, torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def qwen3(hidden: int, inner: int, layers: int, heads: int) -> Any:
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


SMALL, LARGE = (1024, 3072, 28, 16), (4096, 12_288, 36, 32)  # 0.6B, 8B


def test_attention_costs_as_much_as_all_else_in_longer_rows_of_larger_models() -> None:
    small, large = (attention_parity(qwen3(*sizes)) for sizes in (SMALL, LARGE))
    # Half of a row is seen by a token: 12 N tokens against 12 layers x width x tokens / 2 x tokens.
    assert small == pytest.approx(2 * 596e6 / (2 * 28 * 2048), rel=0.01)
    assert 45_000 < large < 60_000
    with torch.device("meta"):
        windows = MistralConfig(**tiny_sizes(61), sliding_window=8)
        assert attention_parity(AutoModelForCausalLM.from_config(windows)) == 1e12


def test_exchanges_cost_a_larger_share_of_smaller_models() -> None:
    small, large = qwen3(*SMALL), qwen3(*LARGE)
    # In bfloat16 and both ways: 16 heads of queries and what they attended to, 8 of keys, 8 of
    # values; 7 of 8 parts go to others; 1256 operations a byte.
    sent = 28 * 2 * 2 * 128 * (2 * 16 + 2 * 8) * 7 / 8
    assert exchange_share(small, 8) == pytest.approx(1256 * sent / (6 * 596e6), rel=0.01)
    assert exchange_share(small, 1) == 0
    assert exchange_share(small, 2) < exchange_share(small, 8)
    assert exchange_share(large, 8) < exchange_share(small, 8) / 4
    # 16 ranks need each head of keys twice.
    assert exchange_share(small, 16) > exchange_share(small, 8) * 15 / 14


def test_layers_without_attention_see_no_token() -> None:
    """However long a row is: of two layers, one attends."""
    model = make("qwen3_5")
    (row,) = rows(1)
    one, twice = micro_batch([row], [0]), micro_batch([row], [0])
    twice.position_ids[:] = 2 * twice.position_ids + 1
    seen = float((one.position_ids + 1).sum())
    assert flops(model, twice) - flops(model, one) == pytest.approx(12 * 4 * 8 * seen)

"""Adapters: what is trained, the base beneath them, and the two ways out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from support.trainer.row_samples import rows, tiny_model
from support.trainer.tiny_models import logprobs, make
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.config import FsdpSettings, LoraSettings
from tracegrad_trainer.engine.model import value_head
from tracegrad_trainer.engine.model.lora import (
    adapter_tensors,
    has_adapters,
    merged_tensors,
    save_adapter,
    without_adapters,
)
from tracegrad_trainer.engine.model.parallelize import build_model

BATCH = micro_batch(rows(3), range(3))
LORA = LoraSettings(rank=3, alpha=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("lora") / "model")


def moved(model: nn.Module) -> nn.Module:
    """Adapters that do something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_fresh_adapters_change_nothing_and_alone_are_trained(folder: Path) -> None:
    plain = build_model(folder, FsdpSettings(device="cpu"))
    model = build_model(folder, FsdpSettings(device="cpu", lora=LORA))
    assert has_adapters(model)
    assert not has_adapters(plain)
    assert torch.equal(logprobs(model, BATCH), logprobs(plain, BATCH))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    # All linear layers of a block, not the head.
    assert len(trained) == 2 * 7 * 2
    logprobs(model, BATCH).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_adapters_are_the_same_at_every_start_and_leave_the_generator_alone(folder: Path) -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = build_model(folder, FsdpSettings(device="cpu", lora=LORA))
        made.append(dict(adapter_tensors(model)))
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name])


def test_without_its_adapters_the_model_is_the_base(folder: Path) -> None:
    plain = build_model(folder, FsdpSettings(device="cpu"))
    model = moved(build_model(folder, FsdpSettings(device="cpu", lora=LORA)))
    adapted = logprobs(model, BATCH)
    with without_adapters(model):
        assert torch.equal(logprobs(model, BATCH), logprobs(plain, BATCH))
    assert torch.equal(logprobs(model, BATCH), adapted)
    assert not torch.allclose(adapted, logprobs(plain, BATCH), atol=1e-2)
    with pytest.raises(RuntimeError), without_adapters(model):
        raise RuntimeError
    assert torch.equal(logprobs(model, BATCH), adapted)


def test_the_adapter_folder_is_peft_s_own(folder: Path, tmp_path: Path) -> None:
    model = moved(build_model(folder, FsdpSettings(device="cpu", lora=LORA)))
    save_adapter(model, tmp_path / "adapter")
    save_adapter(model, tmp_path / "adapter")  # and replaces one that was there
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids = torch.arange(30)[None]
    torch.testing.assert_close(loaded(ids).logits, _alone(model, ids), rtol=1e-5, atol=1e-5)


def test_merged_weights_are_a_model_without_adapters(folder: Path) -> None:
    model = moved(build_model(folder, FsdpSettings(device="cpu", lora=LORA)))
    value_head.attach_value_head(model)
    merged = dict(merged_tensors(model))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(merged)
    ids = torch.arange(30)[None]
    torch.testing.assert_close(plain(ids).logits, _alone(model, ids), rtol=1e-5, atol=1e-5)
    half = dict(merged_tensors(model, torch.bfloat16))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["gpt2", "phi3", "mixtral", "gemma3", "qwen3_5"])
def test_models_of_other_kinds_merge_too(name: str) -> None:
    model = moved(make(name, lora=LORA))
    expected = logprobs(model, BATCH)
    plain = make(name)
    plain.load_state_dict(dict(merged_tensors(model)), strict=False)
    torch.testing.assert_close(logprobs(plain, BATCH), expected, rtol=1e-4, atol=1e-4)


def test_a_convolution_is_no_stack_of_experts() -> None:
    """Beside which layers outside of attention would get no adapters."""
    names = [name for name, _ in adapter_tensors(make("qwen3_5", lora=LORA))]
    assert {"in_proj_qkv", "o_proj", "down_proj"} <= {name.split(".")[-3] for name in names}


def test_layers_can_be_named(folder: Path) -> None:
    named = LoraSettings(rank=2, targets=("q_proj", "v_proj"))
    model = build_model(folder, FsdpSettings(device="cpu", lora=named))
    names = [name for name, _ in adapter_tensors(model)]
    assert len(names) == 2 * 2 * 2
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    wrong = LoraSettings(targets=("c_attn",))
    with pytest.raises(ValueError, match=r"fsdp.lora.targets = \('c_attn',\).*not found"):
        build_model(folder, FsdpSettings(device="cpu", lora=wrong))
    with pytest.raises(ValueError, match="experts of a mixture cannot have adapters"):
        make("mixtral", lora=LoraSettings(targets=("w1", "w2", "w3")))


@pytest.mark.parametrize(
    ("name", "targets", "reason"),
    [
        ("qwen3", ("q_proj", "embed_tokens"), "embedding cannot have adapters"),
        ("gemma3", ("q_proj", "lm_head"), "head shares its weights with the embedding"),
    ],
)
def test_layers_whose_adapters_nobody_would_see_are_refused(
    name: str, targets: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"fsdp\.lora\.targets = .*{reason}"):
        make(name, lora=LoraSettings(targets=targets))


def test_a_head_of_its_own_can_have_an_adapter() -> None:
    model = moved(make("qwen3", lora=LoraSettings(targets=("lm_head",))))
    plain = make("qwen3")
    plain.load_state_dict(dict(merged_tensors(model)), strict=False)
    torch.testing.assert_close(logprobs(plain, BATCH), logprobs(model, BATCH), rtol=1e-4, atol=1e-4)


def _alone(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, packed_rows=PackedRowAttention([ids.shape[1]])).logits
    return logits

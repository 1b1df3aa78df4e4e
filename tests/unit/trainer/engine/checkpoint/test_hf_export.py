"""Weights are pushed and written under the names and in the pieces that model folders have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from support.trainer.tiny_model import save_tiny_model
from support.trainer.tiny_models import CONFIGS, MIXTURES, plain
from tracegrad_trainer.engine import (
    FsdpSettings,
    as_hf_tensors,
    build_model,
    destroy_process_group,
    full_tensors,
    init_process_group,
    shard,
)
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model.lora import merged_tensors

SETTINGS = FsdpSettings(device="cpu", threads=1, attention="eager")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_process_group(SETTINGS)
    yield
    destroy_process_group()


def saved(name: str, folder: Path) -> dict[str, Tensor]:
    """A model's folder -> what its file holds."""
    plain(name).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def loaded(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_loaded_goes_back_as_it_was_in_its_folder(name: str, tmp_path: Path) -> None:
    file = saved(name, tmp_path)
    model = loaded(tmp_path)
    found = as_hf_tensors(model, full_tensors(model))
    # A tied head is in the file of some models; it is the embedding.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert_equal(dict(found), {n: t for n, t in file.items() if n not in tied})


def test_the_names_of_stacked_experts_are_not_those_of_files(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    differ = [
        name for name in MIXTURES if not saved(name, tmp_path / name).keys() >= live_names(name)
    ]
    assert {"mixtral", "qwen3_moe", "olmoe"} <= set(differ)


def live_names(name: str) -> set[str]:
    return {one for one, _ in plain(name).named_parameters()}


def test_a_sharded_mixture_with_adapters_goes_back_merged(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", moe=True)
    settings = SETTINGS.model_copy(update={"lora": LoraSettings(rank=2)})
    model = shard(build_model(folder, settings), init_device_mesh("cpu", (1,)), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.to_local().fill_(0.01)  # type: ignore[attr-defined]
    merged = {name: tensor.clone() for name, tensor in merged_tensors(model)}
    found = dict(as_hf_tensors(model, full_tensors(model)))
    file = load_file(folder / "model.safetensors")
    assert found.keys() == file.keys()
    changed = {name for name in file if not torch.equal(found[name], file[name])}
    assert changed == {name for name in file if "self_attn" in name and "proj" in name}
    for name in changed:
        assert torch.equal(found[name], merged[name])


def test_a_folder_that_we_write_has_the_names_too(tmp_path: Path) -> None:
    file = saved("mixtral", tmp_path / "model")
    model = shard(
        build_model(tmp_path / "model", SETTINGS), init_device_mesh("cpu", (1,)), SETTINGS
    )
    save_hf(model, tmp_path / "out")
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), file)
    again = dict(loaded(tmp_path / "out").named_parameters())
    for name, tensor in loaded(tmp_path / "model").named_parameters():
        assert torch.equal(again[name], tensor), name

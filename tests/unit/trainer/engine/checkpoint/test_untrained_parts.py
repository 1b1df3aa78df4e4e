"""An exported folder has what the trainer left out, so that it can stand for the first one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from support.trainer.tiny_model import tiny_tokenizer
from support.trainer.tiny_models import CONFIGS, VOCABULARY, plain
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.engine import (
    FsdpSettings,
    build_model,
    build_sharded,
    destroy_process_group,
    init_process_group,
)
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.checkpoint.untrained_parts import (
    add_untrained_parts,
    read_tensors,
    served_beside,
)
from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.engine.model.memory import meta_model
from tracegrad_trainer.engine.model.safetensors_files import weight_files
from tracegrad_trainer.launch.model_sizes import model_sizes, read_sizes

SETTINGS = FsdpSettings(device="cpu", threads=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 3.5 as it is published: with a vision tower beside the language model."""
    text = CONFIGS["qwen3_5"]().to_dict()
    text = {name: text[name] for name in text if name not in ("model_type", "architectures")}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 4,
    }
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: VOCABULARY - 1 - i for i, name in enumerate(tokens)}
    config = Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    folder = tmp_path_factory.mktemp("seeing")
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def trained(seeing: Path, tmp_path: Path) -> Iterator[Path]:
    """Its language model with other weights, exported."""
    model = build_sharded(seeing, init_process_group(SETTINGS), SETTINGS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(2)  # type: ignore[attr-defined]
    save_hf(model, tmp_path / "out", companions_from=seeing)
    yield tmp_path / "out"
    destroy_process_group()


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for path in weight_files(folder) for name, one in load_file(path).items()}


def test_a_vision_tower_comes_along(seeing: Path, trained: Path) -> None:
    before, after = tensors(seeing), tensors(trained)
    assert after.keys() == before.keys()
    assert any("visual" in name for name in before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if "visual" in name else 2 * tensor), name
    assert (trained / "config.json").read_text() == (seeing / "config.json").read_text()
    for kind in (Qwen3_5ForConditionalGeneration, AutoModelForCausalLM):
        _, found = kind.from_pretrained(trained, output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]


def test_an_adapter_names_the_layers_of_the_whole(seeing: Path, tmp_path: Path) -> None:
    """By which vLLM and peft find them in a model that sees."""
    model = build_model(seeing, SETTINGS.model_copy(update={"lora": LoraSettings(rank=2)}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    lora.save_adapter(model, tmp_path / "adapter")
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(seeing, dtype=torch.float32)
    ids = torch.arange(3, 12)[None]
    adapted = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(seeing, dtype=torch.float32)
    weights = dict(lora.merged_tensors(model))
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(weights[name])
        found, expected = adapted(ids).logits, merged.eval()(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_vision_tower_has_its_place_where_the_model_is_served(
    seeing: Path, tmp_path: Path
) -> None:
    towers = sum(one.numel() for name, one in tensors(seeing).items() if "visual" in name)
    settings = load_settings(None, [f"model={seeing}", f"state_dir={tmp_path}"])
    model = meta_model(seeing)
    trained = model_sizes(model, settings, gpus=0).served
    assert trained == 4 * sum(p.numel() for p in model.parameters())
    assert read_sizes(settings, gpus=0).served == trained + 4 * towers


def test_a_vision_tower_is_a_part_of_what_is_pushed(seeing: Path) -> None:
    tower = {name: one for name, one in tensors(seeing).items() if "visual" in name}
    found = dict(read_tensors(seeing, served_beside(seeing, meta_model(seeing))))
    assert found.keys() == tower.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tower.items())


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_heads_for_tokens_further_ahead_come_along(shards: str, tmp_path: Path) -> None:
    """Beside weights in one file and in many, in the precision of the export."""
    base, out = tmp_path / "base", tmp_path / "out"
    plain("deepseek_v3").save_pretrained(base)
    ahead = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "mtp.steps": torch.arange(3)}
    save_file(
        load_file(base / "model.safetensors") | ahead,
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    plain("deepseek_v3").bfloat16().save_pretrained(out, max_shard_size=shards)
    config = json.loads((out / "config.json").read_text())
    add_untrained_parts(base, out, torch.bfloat16)
    found = tensors(out)
    assert found.keys() == tensors(base).keys()
    assert torch.equal(found["mtp.steps"], ahead["mtp.steps"])
    name = "model.layers.2.eh_proj.weight"
    assert torch.equal(found[name], ahead[name].bfloat16())
    assert json.loads((out / "config.json").read_text()) == config


def test_a_model_that_is_trained_whole_gets_nothing(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    for folder in (base, out):
        plain("qwen3").save_pretrained(folder)
    before = sorted(path.name for path in out.iterdir())
    add_untrained_parts(base, out, torch.float32)
    assert sorted(path.name for path in out.iterdir()) == before

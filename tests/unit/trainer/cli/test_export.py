"""What `trainer export` writes: a value head stays behind, adapters come alone or merged."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from support.trainer.prepared_run import save_smallest_model, settings_of
from support.trainer.tiny_model import load_model
from support.trainer.tiny_models import plain
from tracegrad_trainer.cli.export import ExportRequest, export
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import full_tensors
from tracegrad_trainer.engine.checkpoint.hf_export import copy_tokenizer_files
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.model.lora import merged_tensors
from tracegrad_trainer.rl.build_learner import build_learner

pytestmark = pytest.mark.usefixtures("one_rank")

IDS = torch.tensor([[5, 17, 200, 3, 99, 41]])
# Of each kind one, of those whose layers are unlike others' all.
EXPORTED = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gemma4"]
EXPORTED += ["granite", "olmo2", "gpt_oss", "qwen3_moe", "olmoe", "mixtral"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest_model(tmp_path_factory.mktemp("smallest") / "model")


def checkpointed(settings: TrainerSettings) -> dict[str, Tensor]:
    """A checkpoint of step 1 of a learner whose trained weights were moved -> all its weights, as
    a model without adapters has them."""
    learner = build_learner(settings, init_device_mesh("cpu", (1,)))
    for module in learner.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                parameter.to_local().add_(0.1 * torch.randn(parameter.shape))
    saver = CheckpointSaver(settings.checkpoints)
    saver.start(learner, 1, {})
    saver.wait()
    named = merged_tensors if settings.fsdp.lora else full_tensors
    return {name: tensor.clone() for name, tensor in named(learner.model)}


def exported(settings: TrainerSettings, out: Path, **changes: object) -> Path:
    request = ExportRequest(**({"out": out, "step": 1, "dtype": "float32"} | changes))  # type: ignore[arg-type]
    assert export(settings, request, Console(quiet=True)) == 0
    return out


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS % model.config.vocab_size).logits  # type: ignore[union-attr]
    return found


def test_a_value_head_is_left_out(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "state", objective__advantage="gae")
    weights = checkpointed(settings)
    assert not any("value_head" in name for name in weights)
    loaded = dict(load_model(exported(settings, tmp_path / "out")).named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_an_adapter_comes_alone_or_merged(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "state", fsdp__lora='{"rank": 4}')
    weights = checkpointed(settings)
    merged = load_model(exported(settings, tmp_path / "merged", merged=True))
    found = dict(merged.named_parameters())
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name

    alone = exported(settings, tmp_path / "alone")
    assert (alone / "adapter_config.json").exists()
    assert not (alone / "config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, alone).eval()
    assert torch.allclose(logits(adapted), logits(merged), atol=1e-4)
    assert not torch.allclose(logits(load_model(model)), logits(merged), atol=1e-2)


def test_precision_is_the_one_that_was_asked_for(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "state")
    weights = checkpointed(settings)
    out = exported(settings, tmp_path / "half", dtype="bfloat16")
    half = AutoModelForCausalLM.from_pretrained(out)
    assert half.dtype == torch.bfloat16
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16()), name


@pytest.mark.parametrize("name", EXPORTED)
def test_every_kind_of_model_that_trains_is_exported(
    name: str, model: Path, tmp_path: Path
) -> None:
    """And transformers says the same with what was written as with the weights themselves."""
    folder = tmp_path / "model"
    trained = plain(name)
    trained.save_pretrained(folder)  # type: ignore[operator]
    copy_tokenizer_files(model, folder)
    settings = settings_of(folder, tmp_path / "state")
    weights = checkpointed(settings)
    named = dict(trained.named_parameters())
    with torch.no_grad():
        for parameter, tensor in weights.items():
            if parameter in named:
                named[parameter].copy_(tensor)
    written, before = load_model(exported(settings, tmp_path / "out")), load_model(folder)
    for each in (written, before):
        each.set_attn_implementation("eager")  # others leave out soft caps and sinks
    assert torch.allclose(logits(written), logits(trained), atol=1e-5)
    assert not torch.allclose(logits(before), logits(trained), atol=1e-2)


def test_a_folder_that_holds_something_else_is_not_touched(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "state")
    checkpointed(settings)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("irreplaceable")
    request = ExportRequest(out=tmp_path / "mine", step=1)
    assert export(settings, request, Console(quiet=True)) == 1
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "irreplaceable"
    # A folder of settings that are named as a model's are is no model.
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert export(settings, request, Console(quiet=True)) == 1
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "irreplaceable"


@pytest.mark.parametrize("lora", ["null", '{"rank": 4}'])
def test_an_export_of_before_is_replaced(model: Path, tmp_path: Path, lora: str) -> None:
    settings = settings_of(model, tmp_path / "state", fsdp__lora=lora)
    checkpointed(settings)
    exported(settings, tmp_path / "out")
    before = (tmp_path / "out").stat().st_ino
    exported(settings, tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out").stat().st_ino != before


@pytest.mark.parametrize("lora", ["null", '{"rank": 4}'])
def test_the_model_that_training_begins_with_is_not_replaced(
    model: Path, tmp_path: Path, lora: str
) -> None:
    mine = Path(shutil.copytree(model, tmp_path / "model"))
    (tmp_path / "link").symlink_to(mine)
    settings = settings_of(mine, tmp_path / "state", fsdp__lora=lora)
    checkpointed(settings)
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    for out in (mine, tmp_path / "link"):
        shown = Console(file=StringIO(), width=500)
        assert export(settings, ExportRequest(out=out, step=1), shown) == 1
        assert "training begins with the model in it" in shown.file.getvalue()  # type: ignore[attr-defined]
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before

"""Which LoRA adapters are pushed alone, and what vLLM is started with for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.trainer.step_samples import trainer_settings
from support.trainer.tiny_model import load_model, save_tiny_model
from tracegrad_trainer.config.gpus import GpuSettings
from tracegrad_trainer.config.served_adapter import why_not_served
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.inference.weight_files import WeightFiles
from tracegrad_trainer.inference.zero_adapter import (
    ADAPTER_CONFIG,
    keep_adapter,
    write_zero_adapter,
    zero_adapter,
)
from tracegrad_trainer.rl.preflight import describe_lora_push


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("dense") / "model")


def with_model(folder: Path, model: Path) -> Path:
    (folder / "model").symlink_to(model)
    return folder


def test_what_vllm_cannot_serve_is_named(dense: Path, tmp_path: Path) -> None:
    def reason(sleep_level: int | None = None, model: Path = dense, **changes: object) -> str:
        return why_not_served(model, LoraSettings(**changes), sleep_level=sleep_level) or ""  # type: ignore[arg-type]

    assert reason() == ""
    assert reason(sleep_level=1) == ""
    assert "gpus.sleep_level = 2" in reason(sleep_level=2)
    assert "rank = 513" in reason(rank=513)
    assert "lm_head" in reason(targets=("q_proj", "lm_head"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    assert "Qwen3MoeForCausalLM" in reason(model=tmp_path)
    assert why_not_served(dense, None, sleep_level=None) is not None


@pytest.mark.parametrize(
    ("push", "words"),
    [("auto", "adapter alone"), ("adapter", "adapter alone"), ("merged", "whole")],
)
def test_the_setting_decides_and_the_start_says_so(
    push: str, words: str, dense: Path, tmp_path: Path
) -> None:
    changes = {"fsdp": {"lora": {"rank": 12}}, "push": {"lora": push}}
    settings = trainer_settings(with_model(tmp_path, dense), **changes)
    line = describe_lora_push(settings)
    assert line is not None
    assert words in line
    arguments = settings.vllm.arguments()
    assert ("--enable-lora" in arguments) == (push != "merged")
    if push != "merged":
        assert arguments[arguments.index("--max-lora-rank") + 1] == "16"
        module = json.loads(arguments[arguments.index("--lora-modules") + 1])
        assert module == {"name": "policy", "path": str(settings.vllm.adapter)}
        assert arguments[arguments.index("--served-model-name") + 1] == "policy-base"
        assert "tracegrad_adapter" in arguments[arguments.index("--weight-transfer-config") + 1]


def test_candidates_are_a_second_adapter_where_there_is_one_engine(
    dense: Path, tmp_path: Path
) -> None:
    model = with_model(tmp_path, dense)
    changes: dict[str, Any] = {"fsdp": {"lora": {"rank": 8}}, "promotion": {"gate": "canary"}}
    settings = trainer_settings(model, **changes)
    arguments = settings.vllm.arguments()
    assert arguments[arguments.index("--max-loras") + 1] == "2"
    at = arguments.index("--lora-modules")
    modules = [json.loads(word) for word in arguments[at + 1 : at + 3]]
    assert [module["name"] for module in modules] == ["policy", "policy-candidate"]
    assert tuple(Path(module["path"]) for module in modules) == settings.vllm.adapter_links
    push = {"engines": ["http://127.0.0.1:8101"]}
    assert not trainer_settings(model, **changes, push=push).vllm.candidates, "it has an engine"
    for more, words in (
        ({"push": {"lora": "merged"}}, "push.lora = 'merged'"),
        ({"vllm": {"urls": ["http://127.0.0.1:8101"]}}, "vllm.urls: others start it"),
        ({"gpus": {"share": True}}, "gpus.share: it sleeps"),
    ):
        with pytest.raises(ValueError, match=f"no second adapter .{words}"):
            trainer_settings(model, **changes, **more)


def test_an_adapter_that_cannot_be_served_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    changes = {"fsdp": {"lora": {"rank": 600}}, "push": {"lora": "adapter"}}
    with pytest.raises(ValueError, match=r"push.lora = 'adapter': fsdp.lora.rank = 600"):
        trainer_settings(with_model(tmp_path, dense), **changes)
    changes = {"fsdp": {"lora": {"rank": 8}}, "push": {"transport": "gloo"}}
    settings = trainer_settings(tmp_path, **changes)
    assert settings.vllm.adapter is None
    assert "push.transport = 'gloo' carries whole weights" in str(describe_lora_push(settings))


@pytest.mark.parametrize("level", [None, 1, 2])
def test_beneath_an_adapter_the_weights_sleep_in_the_hosts_memory(
    level: int | None, dense: Path, tmp_path: Path
) -> None:
    changes = {"fsdp": {"lora": {"rank": 8}}, "gpus": {"share": True, "sleep_level": level}}
    settings = trainer_settings(with_model(tmp_path, dense), **changes)
    assert settings.gpus.planned_sleep_level == (level or 1)
    assert (settings.vllm.adapter is None) == (level == 2)
    # As a plan does where the host has no room.
    deeper = settings.with_changes(gpus=GpuSettings(share=True, sleep_level=2))
    assert deeper.vllm.adapter is None


def test_without_lora_nothing_changes(dense: Path, tmp_path: Path) -> None:
    settings = trainer_settings(with_model(tmp_path, dense))
    assert describe_lora_push(settings) is None
    assert settings.vllm.adapter is None
    assert "--enable-lora" not in settings.vllm.arguments()
    assert VllmSettings(model=str(dense)).transfer_backend == "tracegrad_shm"


def test_the_files_are_an_adapter_of_peft(dense: Path, tmp_path: Path) -> None:
    model = lora.attach_adapters(load_model(dense), LoraSettings(rank=4, alpha=8))
    files = WeightFiles(tmp_path)
    tensors = dict(lora.adapter_tensors(model))
    [path] = files.write_adapter(3, tensors.items(), lora.adapter_config(model))
    lora.save_adapter(model, tmp_path / "peft")
    config = json.loads((path.parent / ADAPTER_CONFIG).read_text())
    theirs = json.loads((tmp_path / "peft" / ADAPTER_CONFIG).read_text())
    named = ("r", "lora_alpha", "peft_type", "use_rslora", "modules_to_save")
    assert {name: config[name] for name in named} == {name: theirs[name] for name in named}
    assert sorted(config["target_modules"]) == sorted(theirs["target_modules"])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    broken = [(name, tensor * float("nan")) for name, tensor in tensors.items()]
    with pytest.raises(ValueError, match=r"lora_A.* not finite"):
        files.write_adapter(4, broken, {})
    files.close()


def test_the_link_leads_to_zeros_and_then_to_what_is_served(tmp_path: Path) -> None:
    link, served = tmp_path / "run" / "adapter", tmp_path / "served"
    served.mkdir()
    write_zero_adapter(link)
    assert link.resolve() == zero_adapter(link).resolve()
    [weights] = link.glob("*.safetensors")
    assert not any(tensor.any() for tensor in load_file(weights).values())
    (served / "weights").write_text("1")
    keep_adapter(link, served)
    (served / "weights").unlink()  # the pusher has gone, or has a newer one
    assert (link / "weights").read_text() == "1"
    write_zero_adapter(link)  # vLLM starts again
    assert link.resolve() == zero_adapter(link).resolve()
    assert sorted(path.name for path in link.parent.iterdir()) == ["adapter", "zero_adapter"]

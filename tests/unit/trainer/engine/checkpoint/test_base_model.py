"""A checkpoint knows its model folder by the weights in it, wherever and however they are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tracegrad_trainer.engine.checkpoint.base_model import (
    BaseModelRecord,
    base_model_difference,
    weights_digest,
)
from tracegrad_trainer.engine.config import LoraSettings

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    torch.manual_seed(0)
    tensors = {"a": torch.randn(300, 40), "b": torch.randn(7), "c": torch.randn(64, 64)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def saved(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def test_a_folder_that_was_moved_or_divided_into_shards_is_the_same(
    folder: Path, tmp_path: Path
) -> None:
    digest = weights_digest(folder)
    tensors = load_file(folder / "model.safetensors")
    shards = saved(tmp_path / "shards", {"c": tensors.pop("c")}, "model-1.safetensors")
    saved(shards, tensors, "model-2.safetensors")
    assert weights_digest(shards) == digest
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert base_model_difference(BaseModelRecord.of(folder, None), moved, None) is None


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_one_tensor_that_was_trained_is_another_model(folder: Path, name: str) -> None:
    before = BaseModelRecord.of(folder, None)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] *= 1.001
    saved(folder, tensors)
    problem = base_model_difference(before, folder, None)
    others = "the weights in it are others than those that were trained"
    assert problem == f"model = {str(folder)!r}: {others}"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"b": t["b"].double()},
        lambda t: t | {"b": t["b"].reshape(7, 1)},
        lambda t: {("d" if name == "b" else name): tensor for name, tensor in t.items()},
        lambda t: t | {"d": torch.zeros(1)},
    ],
)
def test_names_types_and_shapes_are_looked_at(folder: Path, change: object) -> None:
    before = weights_digest(folder)
    saved(folder, change(load_file(folder / "model.safetensors")))  # type: ignore[operator]
    assert weights_digest(folder) != before


def test_another_folder_is_named_with_the_former_one(folder: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", {"a": torch.ones(2)})
    problem = base_model_difference(BaseModelRecord.of(folder, None), other, None)
    assert problem == f"model = {str(other)!r}: the checkpoints were trained from {str(folder)!r}"


def test_where_a_checkpoint_has_all_weights_the_folders_may_be_others(
    folder: Path, tmp_path: Path
) -> None:
    other = saved(tmp_path / "other", {"a": torch.ones(2)})
    full, lora = BaseModelRecord.of(folder, None), LoraSettings(targets=["q_proj", "v_proj"])
    assert base_model_difference(full, other, None, weights=False) is None
    adapters = BaseModelRecord.of(folder, lora)
    assert base_model_difference(adapters, other, lora, weights=False) is not None
    turned = LoraSettings(targets=["v_proj", "q_proj"])
    assert base_model_difference(adapters, folder, turned) is None


def test_files_beside_the_models_own_are_not_looked_at(folder: Path) -> None:
    digest = weights_digest(folder)
    for name in ("consolidated.safetensors", "model.fp16.safetensors"):
        saved(folder, {"a": torch.ones(2)}, name)
    assert weights_digest(folder) == digest
    index = {"weight_map": {"a": "consolidated.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_digest(folder) == digest, "transformers takes the one file before an index"
    (folder / "model.safetensors").unlink()
    assert weights_digest(folder) not in (digest, None)


def test_what_an_earlier_version_recorded_is_compared_as_far_as_it_is_there(
    folder: Path, tmp_path: Path
) -> None:
    other = saved(tmp_path / "other", {"a": torch.ones(2)})
    earlier = BaseModelRecord(path=str(folder))
    assert base_model_difference(earlier, folder, None) is None
    assert base_model_difference(earlier, other, None) is not None
    shutil.rmtree(folder)
    assert base_model_difference(earlier, other, None) is None, "nobody can say"


def test_files_that_are_none_are_not_known(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None
    for content in (b"", b"short", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert weights_digest(tmp_path) is None, content


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (None, LoraSettings(), "fsdp.lora: the checkpoints are of full weights"),
        (LoraSettings(rank=8), None, "fsdp.lora: the checkpoints hold adapters of rank 8"),
        (
            LoraSettings(rank=8),
            LoraSettings(),
            "fsdp.lora.rank = 16: the checkpoints hold adapters",
        ),
        (LoraSettings(), LoraSettings(alpha=8), "fsdp.lora.alpha = 8: the checkpoints hold"),
        (
            LoraSettings(),
            LoraSettings(targets=("q_proj",)),
            "fsdp.lora.targets = ('q_proj',): the checkpoints hold adapters made with 'all-linear'",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_named(
    folder: Path, then: LoraSettings | None, now: LoraSettings | None, words: str
) -> None:
    kept = BaseModelRecord.model_validate_json(BaseModelRecord.of(folder, then).model_dump_json())
    problem = base_model_difference(kept, folder, now)
    assert problem is not None
    assert problem.startswith(words)
    assert base_model_difference(kept, folder, then) is None

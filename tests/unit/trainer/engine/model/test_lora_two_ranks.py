"""Adapters on two ranks against one, under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.trainer import lora_ranks
from support.trainer.ranks import run_on_ranks
from support.trainer.row_samples import rows, tiny_model
from support.trainer.tiny_models import logprobs
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model.parallelize import build_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-ranks")
    tiny_model(folder / "model")
    for ranks in (1, 2):
        run_on_ranks(lora_ranks.main, ranks, folder)
    return folder


def seen(folder: Path, ranks: int, reshard: bool) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = torch.load(folder / f"{ranks}.pt", weights_only=True)
    return found[f"reshard={reshard}"]


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert (a[name] - b[name]).abs().max() <= 1e-5 * b[name].abs().max(), name


@pytest.mark.parametrize("reshard", [True, False])
def test_two_ranks_train_the_adapters_of_one(folder: Path, reshard: bool) -> None:
    one, two = (seen(folder, ranks, reshard) for ranks in (1, 2))
    assert two["sharded"]
    close(two["adapter"], one["adapter"])
    close(two["merged"], one["merged"])
    assert (two["after"] - two["before"]).abs().max() > 0.1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_reference_is_the_base_however_far_the_adapters_are(
    folder: Path, ranks: int, reshard: bool
) -> None:
    found = seen(folder, ranks, reshard)
    base = logprobs(
        build_model(folder / "model", FsdpSettings(device="cpu")), micro_batch(rows(4), range(4))
    )
    torch.testing.assert_close(found["reference"], base, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["before"], base, rtol=1e-6, atol=1e-6)


def test_the_adapter_folder_does_not_depend_on_ranks(folder: Path) -> None:
    one, two = (load_file(folder / f"adapter-{n}" / "adapter_model.safetensors") for n in (1, 2))
    close(two, one)
    assert (folder / "adapter-2" / "adapter_config.json").is_file()

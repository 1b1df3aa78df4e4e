"""Rows in a pack do not see each other: packed log-probabilities equal those of rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learn_samples import rows, tiny_model
from test_model_kinds import alone
from torch import nn
from zoo import logprobs

from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.fsdp import FsdpSettings, build_model
from tracegrad_trainer.fsdp.attention import attention_of_rows, chosen
from tracegrad_trainer.fsdp.packed_attention import PackedRows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_packed_equals_unpacked(folder: Path, attention: str) -> None:
    reference = build_model(folder, FsdpSettings(device="cpu", attention="sdpa"))
    model = build_model(folder, FsdpSettings(device="cpu", attention=attention))
    # A short row beside long ones: the packed attention makes blocks of unequal width.
    made = [*rows(7), *rows(3, seed=1, longest=13), *rows(2, seed=2, longest=120)]
    found = logprobs(model, micro_batch(made, range(len(made))))
    expected = torch.cat([alone(reference, row) for row in made])
    assert (found.double() - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "keyword arguments"),
        ({"packed_rows": PackedRows([6]), "position_bias": torch.zeros(1)}, "position biases"),
        ({"packed_rows": PackedRows([6]), "is_causal": False}, "attends to what comes later"),
        ({"packed_rows": PackedRows([6]), "attention_mask": torch.zeros(1)}, "masks of its own"),
    ],
)
def test_models_that_need_more_of_attention_are_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    x = torch.zeros(1, 2, 6, 4)
    given = {"attention_mask": None} | arguments
    with pytest.raises(ValueError, match=f"{reason}.*set attention = 'eager'"):
        attention_of_rows(nn.Identity(), x, x, x, **given)


@pytest.mark.parametrize(
    ("settings", "device", "name"),
    [
        ({}, "cpu", "tracegrad_packed"),
        ({"compute_dtype": "bfloat16"}, "cpu", "tracegrad_packed"),
        ({}, "cuda", "tracegrad_packed"),
        ({"compute_dtype": "bfloat16"}, "cuda", "tracegrad_varlen"),
        ({"attention": "packed", "compute_dtype": "bfloat16"}, "cuda", "tracegrad_packed"),
        ({"attention": "sdpa"}, "cuda", "sdpa"),
    ],
)
def test_the_attention_is_chosen_by_device_and_precision(
    settings: dict[str, Any], device: str, name: str
) -> None:
    assert chosen(FsdpSettings(**settings), torch.device(device)) == name


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"attention": "varlen"}, "cpu", "needs a CUDA device"),
        ({"attention": "varlen"}, "cuda", "set fsdp.compute_dtype = 'bfloat16'"),
        ({"attention": "flahs"}, "cpu", "'auto', 'packed', 'varlen', 'sdpa'"),
    ],
)
def test_attentions_that_are_not_here_are_refused(
    settings: dict[str, Any], device: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        chosen(FsdpSettings(**settings), torch.device(device))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-folder"):
        build_model("./no-such-folder", FsdpSettings(device="cpu"))

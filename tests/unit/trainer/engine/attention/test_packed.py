"""Rows in a pack do not see each other: packed log-probabilities equal those of rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from support.trainer.forward_checks import alone
from support.trainer.row_samples import rows, tiny_model
from support.trainer.tiny_models import logprobs
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine import FsdpSettings, build_model
from tracegrad_trainer.engine.attention.dispatch import attention_of_rows, choose_attention
from tracegrad_trainer.engine.attention.masked import ScoreTransform, masked_attention
from tracegrad_trainer.engine.attention.packed import PackedRowAttention


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
        (
            {"packed_rows": PackedRowAttention([6]), "position_bias": torch.zeros(1)},
            "position biases",
        ),
        (
            {"packed_rows": PackedRowAttention([6]), "is_causal": False},
            "attends to what comes later",
        ),
        (
            {"packed_rows": PackedRowAttention([6]), "attention_mask": torch.zeros(1)},
            "masks of its own",
        ),
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
        ({}, "cuda", "tracegrad_varlen"),
        ({"compute_dtype": "float32"}, "cuda", "tracegrad_packed"),
        ({"compute_dtype": "bfloat16"}, "cuda", "tracegrad_varlen"),
        ({"attention": "packed", "compute_dtype": "bfloat16"}, "cuda", "tracegrad_packed"),
        ({"attention": "sdpa"}, "cuda", "sdpa"),
    ],
)
def test_the_attention_is_chosen_by_device_and_precision(
    settings: dict[str, Any], device: str, name: str
) -> None:
    assert choose_attention(FsdpSettings(**settings), torch.device(device)) == name


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"attention": "varlen"}, "cpu", "needs a CUDA device"),
        (
            {"attention": "varlen", "compute_dtype": "float32"},
            "cuda",
            "set fsdp.compute_dtype = 'bfloat16'",
        ),
        ({"attention": "flahs"}, "cpu", "'auto', 'packed', 'varlen', 'sdpa'"),
    ],
)
def test_attentions_that_are_not_here_are_refused(
    settings: dict[str, Any], device: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_attention(FsdpSettings(**settings), torch.device(device))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-folder"):
        build_model("./no-such-folder", FsdpSettings(device="cpu"))


@pytest.mark.parametrize(
    ("dtype", "masked", "heads"),
    [
        (torch.bfloat16, False, 2),
        (torch.bfloat16, True, 4),
        (torch.float32, False, 4),
    ],
)
def test_keys_are_repeated_for_kernels_of_a_gpu_that_want_as_many_heads(
    dtype: torch.dtype, masked: bool, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shapes alone: only the flash kernel takes fewer, and it has neither masks nor float32."""
    seen = []
    real = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        seen.append((k.shape[1], v.shape[1], given["enable_gqa"]))
        return real(q, k, v, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    with FakeTensorMode():
        query = torch.empty(1, 4, 8, 16, device="cuda", dtype=dtype)
        key = torch.empty(1, 2, 8, 16, device="cuda", dtype=dtype)
        mask = torch.empty(8, 8, device="cuda", dtype=torch.bool) if masked else None
        assert masked_attention(query, key, key, ScoreTransform(), mask).shape == query.shape
    assert seen == [(heads, heads, heads == 2)]


@pytest.mark.parametrize("window", [None, 3])
def test_repeated_keys_are_the_same_attention(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 8, 16, generator=made)
    key, value = torch.randn(2, 2, 2, 8, 16, generator=made)
    mask = None if window is None else torch.ones(8, 8).tril().triu(1 - window).bool()
    shared = masked_attention(query, key, value, ScoreTransform(), mask)
    monkeypatch.setattr("tracegrad_trainer.engine.attention.masked._groups_fused", lambda *_: False)
    repeated = masked_attention(query, key, value, ScoreTransform(), mask)
    torch.testing.assert_close(repeated, shared)

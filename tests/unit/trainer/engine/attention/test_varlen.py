"""Rows by the variable-length kernel: its arguments, with a reference in the kernel's place."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from support.trainer.forward_checks import ROWS, agree, gradients
from support.trainer.tiny_models import logprobs, make
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.attention import varlen
from tracegrad_trainer.engine.attention.masked import ScoreTransform


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """What `varlen_attn` documents, one row after the other: token i of a row sees the
    tokens i - left to i + right, where -1 is no bound."""
    bound = inspect.signature(varlen_attn).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    left, right = given["window_size"]
    starts = given["cu_seq_q"].tolist()
    assert given["cu_seq_q"].dtype is torch.int32
    assert given["cu_seq_k"].tolist() == starts
    assert given["max_q"] == given["max_k"] == max(b - a for a, b in pairwise(starts))
    out = []
    for start, end in pairwise(starts):
        q, k, v = (given[n][start:end].transpose(0, 1)[None] for n in ("query", "key", "value"))
        place = torch.arange(end - start)
        ahead = place[None] - place[:, None]
        mask = (ahead <= right) if right >= 0 else torch.ones_like(ahead, dtype=torch.bool)
        if left >= 0:
            mask = mask & (-ahead <= left)
        one = F.scaled_dot_product_attention(
            q, k, v, mask, scale=given["scale"], enable_gqa=given["enable_gqa"]
        )
        out.append(one[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt2", "gpt_oss"])
def test_the_kernel_gets_rows_heads_scale_and_window(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return reference(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    seen = []
    for attention in ("packed", "varlen"):
        model = make(name, attention)
        logp = logprobs(model, micro_batch(ROWS, range(len(ROWS))))
        logp.square().sum().backward()
        seen.append((logp.detach(), gradients(model)))
    torch.testing.assert_close(seen[1][0], seen[0][0], rtol=1e-5, atol=1e-5)
    agree(seen[1][1], seen[0][1])
    # Soft caps and sinks it has not: such layers go in padded blocks.
    assert bool(calls) == (name not in ("gemma2", "gpt_oss"))


@pytest.mark.parametrize(("width", "taken"), [(8, True), (12, False), (256, True), (264, False)])
def test_heads_that_the_kernel_refuses_go_in_padded_blocks(
    width: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes multiples of eight up to 256 and raises at others."""
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return reference(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    rows = varlen.VarlenRowAttention([3, 5], "cpu")
    assert rows.attend(*torch.ones(3, 1, 2, 8, width), ScoreTransform()).shape == (1, 8, 2, width)
    assert bool(calls) == taken


def test_torch_takes_the_call_as_it_is_made() -> None:
    """Shapes only, without a device."""
    rows = varlen.VarlenRowAttention([3, 5], "meta")
    q = torch.empty(1, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    assert rows.attend(q, kv, kv, ScoreTransform(window=2)).shape == (1, 8, 4, 16)


def test_a_torch_that_does_not_ask_for_groups_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11, whose kernel takes them as they come."""
    calls = []

    def before_2_12(*args: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        calls.append([x.shape[1] for x in args[:3]])
        return torch.empty_like(args[0])

    monkeypatch.setattr(varlen, "varlen_attn", before_2_12)
    monkeypatch.setattr(varlen, "_ASKS_FOR_GROUPS", False)
    rows = varlen.VarlenRowAttention([3, 5], "cpu")
    q, kv = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 8, 16)
    rows.attend(q, kv, kv, ScoreTransform())
    assert calls == [[4, 2, 2]]

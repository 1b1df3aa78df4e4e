"""Exact attention within a mask, for any form of scores that transformers' models ask for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

# Of all rows of a pack, one behind the other.
Queries = Float[Tensor, "1 heads tokens width"]
Keys = Float[Tensor, "1 kv_heads tokens width"]
Values = Float[Tensor, "1 kv_heads tokens value_width"]
Attended = Float[Tensor, "1 tokens heads value_width"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreTransform:
    """How a layer turns query times key into weights."""

    scale: float | None = None  # None: 1 / sqrt(head dimension)
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # c tanh(score / c) (Gemma 2, arXiv 2408.00118)
    # Logits that take weight and give nothing (GPT-OSS).
    sinks: Float[Tensor, " heads"] | None = None

    @property
    def plain(self) -> bool:
        """Whether fused kernels compute these scores."""
        return self.softcap is None and self.sinks is None


def masked_attention(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    value: Float[Tensor, "rows kv_heads keys value_width"],
    scores: ScoreTransform,
    mask: Bool[Tensor, "queries keys"] | None,
) -> Float[Tensor, "rows heads queries value_width"]:
    """`mask` is true where a query sees a key.

    Without a mask: causal, of plain scores alone. The window is the caller's, in the mask. Key
    and value may have fewer heads than the query; each query must see some key.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not (scores.plain and _groups_fused(query, value, mask)):
        key, value, groups = (*(x.repeat_interleave(groups, 1) for x in (key, value)), 1)
    if scores.plain:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scale,
            enable_gqa=groups > 1,
        )
    assert mask is not None
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    logits = query @ key.transpose(-1, -2) * scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _groups_fused(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel is sure to take fewer heads of keys than of queries.

    On CUDA that is the flash kernel alone; without it all scores would be written out, where
    with as many heads the memory-efficient kernel takes over.
    """
    if query.device.type != "cuda":
        return True
    half = query.dtype in (torch.bfloat16, torch.float16)
    return mask is None and half and query.shape[-1] == value.shape[-1] <= 256

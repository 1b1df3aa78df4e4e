"""FlexAttention over packed rows and trees: CUDA devices. It skips blocks that nobody sees.

Uncompiled, as on a CPU, it writes out all scores, and has no backward there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
)
from tracegrad_trainer.engine.attention.visibility import TokenVisibility

# Of compiled flex attention: heads narrower than this it refuses; and graphs of it.
_NARROWEST_HEAD = 16
_GRAPHS = 64
# For packs under 128 tokens torch would take its kernel for decoding, which has no form for more
# than 128 queries, those of all heads of a group counted ("No choices exist for backend").
_KERNEL = {"BACKEND": "TRITON"}


def takes_heads(query: Tensor, value: Tensor) -> bool:
    """Whether its kernels are there for these heads, on this device."""
    return query.is_cuda and min(query.shape[-1], value.shape[-1]) >= _NARROWEST_HEAD


class FlexRowAttention:
    """Of all rows of a pack together."""

    def __init__(self, visibility: TokenVisibility) -> None:
        self.visibility = visibility
        self._block_masks: dict[int | None, BlockMask] = {}  # by window

    def attend(
        self,
        query: Queries,
        key: Keys,
        value: Values,
        scores: ScoreTransform,
        *,
        compiled: bool = True,
    ) -> Attended:
        window = scores.window
        if window not in self._block_masks:  # layers of the same window share it
            self._block_masks[window] = self.visibility.block_mask(window)
        return _flex(query, key, value, scores, self._block_masks[window], compiled)


def _flex(
    query: Queries,
    key: Keys,
    value: Values,
    scores: ScoreTransform,
    block_mask: BlockMask,
    compiled: bool,
) -> Attended:
    cap = scores.softcap

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    attention: Any = _compiled() if compiled else flex_attention
    found = attention(
        query,
        key,
        value,
        score_mod=None if cap is None else capped,
        block_mask=block_mask,
        scale=scores.scale,
        enable_gqa=key.shape[1] != query.shape[1],
        kernel_options=_KERNEL,
        **({} if scores.sinks is None else {"return_aux": AuxRequest(lse=True)}),
    )
    if scores.sinks is None:
        out: Tensor = found
        return out.transpose(1, 2)
    out, aux = found
    # A sink is one more entry of the softmax: it takes its share from all others alike.
    share = torch.sigmoid(aux.lse - scores.sinks.float()[None, :, None])
    return (out * share[..., None].to(out.dtype)).transpose(1, 2)


@cache
def _compiled() -> Any:
    # Uncompiled it writes out all scores. So it would beyond dynamo's limit, and there is a graph
    # for each window, cap, head's width, with and without gradient, for short and long packs.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS)
    # A cap that is a variable of the graph has no backward: dynamo would leave it uncompiled.
    dynamo.specialize_float = True
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)

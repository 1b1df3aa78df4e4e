"""Attention over packed rows: no row sees another, and no [T, T] mask where none is needed.

transformers hands the keyword arguments of a model's forward on to the attention of each layer.
`row_arguments` makes of a micro-batch the argument that holds where its rows are, and the attention
that is registered here under our names calls it: `PackedRowAttention`,
`VarlenRowAttention` or `TreeRowAttention`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
)
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.attention.tree import TreeRowAttention
from tracegrad_trainer.engine.attention.varlen import VarlenRowAttention
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import compute_dtype

PACKED = "tracegrad_packed"
VARLEN = "tracegrad_varlen"
OURS = {"packed": PACKED, "varlen": VARLEN}


@runtime_checkable
class RowAttention(Protocol):
    """Where the rows of a pack are, and how their tokens attend."""

    def attend(
        self, query: Queries, key: Keys, value: Values, scores: ScoreTransform
    ) -> Attended: ...


# Rows are Python's, and its kernels are compiled already.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_of_rows(
    module: nn.Module,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_rows: RowAttention | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Attended, None]:
    """transformers' attention interface.

    Raises:
        ValueError: the model needs something of its attention that this one has not.
    """
    unknown = None
    if packed_rows is None:
        unknown = "does not hand keyword arguments to its attention"
    elif attention_mask is not None:
        unknown = "makes attention masks of its own"
    elif kwargs.get("position_bias") is not None:
        unknown = "adds position biases to attention scores"
    elif kwargs.get("is_causal") is False:
        unknown = "attends to what comes later"
    if unknown is not None:
        raise ValueError(f"fsdp.attention: this model {unknown}; set attention = 'eager'")
    assert packed_rows is not None
    scores = ScoreTransform(scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return packed_rows.attend(query, key, value, scores), None


for _name in OURS.values():
    AttentionInterface.register(_name, attention_of_rows)


def choose_attention(settings: FsdpSettings, device: torch.device) -> str:
    """The setting as transformers knows it; "auto" is varlen where there is that, else packed.

    Raises:
        ValueError: there is no such attention on this device.
    """
    half = compute_dtype(settings, device) != torch.float32
    name = settings.attention
    if name == "auto":
        name = "varlen" if device.type == "cuda" and half else "packed"
    elif name == "varlen" and device.type != "cuda":
        raise ValueError(
            f"fsdp.attention = 'varlen' needs a CUDA device, this is {device.type}: set 'auto'"
        )
    elif name == "varlen" and not half:
        raise ValueError(
            "fsdp.attention = 'varlen' computes in half precision: set"
            " fsdp.compute_dtype = 'bfloat16', or fsdp.attention = 'packed'"
        )
    return OURS.get(name, name)


def row_arguments(model: nn.Module, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model's forward that keep a micro-batch's rows apart.

    transformers' own attentions find the rows by the position ids, which start again with each;
    only branches of a tree have to be named to them.

    Raises:
        ValueError: rows are trees, and the model's attention cannot have branches.
    """
    config: Any = model.config
    name: str = config._attn_implementation
    ends = batch.subtree_end
    if name in OURS.values():
        return {"packed_rows": _rows(name, batch, device)}
    if ends is None:
        return {}
    window = getattr(config, "sliding_window", None)
    if name not in ("sdpa", "eager") or (window and window <= batch.position_ids.max()):
        raise ValueError(
            f"rows are trees, which this model's attention = {name!r} cannot have:"
            " set fsdp.attention to 'auto', 'packed' or 'varlen'"
        )
    return {"attention_mask": _tree_mask(ends, name, model, device)}


def _rows(name: str, batch: MicroBatch, device: torch.device) -> RowAttention:
    if batch.subtree_end is not None:
        return TreeRowAttention(
            batch.subtree_end, batch.position_ids[0], batch.row_lengths.tolist(), device
        )
    if name == VARLEN:
        return VarlenRowAttention(batch.row_lengths.tolist(), device)
    return PackedRowAttention(batch.row_lengths.tolist(), device)


def _tree_mask(
    ends: Int64[NDArray[np.int64], " tokens"], name: str, model: nn.Module, device: torch.device
) -> Shaped[Tensor, "1 1 tokens tokens"]:
    """What sdpa (bool) and eager (added to the scores) take as it is."""
    place = np.arange(len(ends))
    sees = torch.from_numpy((place[None] <= place[:, None]) & (place[:, None] < ends[None]))
    mask = sees.to(device)[None, None]
    if name == "sdpa":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(
        ~mask, torch.finfo(dtype).min
    )

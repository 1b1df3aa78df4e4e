"""What transformers' models and configs say of a model's layers, each kind in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tracegrad_trainer.engine.attention.masked import ScoreTransform

# Most configs; Gemma 4; Aria.
_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
# Kinds of layers. Those with a mask see rows apart by it; others look at no token but their own.
MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
POINTWISE_LAYERS = {"mlp", "moe"}
_WITHOUT_ATTENTION = POINTWISE_LAYERS | {"linear_attention", "conv", "mamba"}


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in order: the units that are sharded, recomputed and exported.

    Raises:
        ValueError: the model's class does not say what they are.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP gives modules a class of its own, above theirs.
    found = [
        module
        for module in model.modules()
        if names & {kind.__name__ for kind in type(module).__mro__}
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} names no blocks (_no_split_modules): it cannot be sharded"
        )
    return found


def layer_configs(config: Any) -> Sequence[Any]:
    """The config of each layer of a model's text part.

    Of a model whose layers differ (Gemma 4) the whole config refuses to say what differs.
    """
    text = config.get_text_config()
    own: Sequence[Any] | None = getattr(text, "per_layer_config", None)
    return [text] * text.num_hidden_layers if own is None else own


def query_heads(layer: Any) -> tuple[int, int]:
    """(number, width) of a layer's query heads. Raises ValueError: it can have none."""
    heads: int | None = getattr(layer, "num_attention_heads", None)
    if not heads:
        raise ValueError(
            f"model: {type(layer).__name__} has no attention heads; a model without attention"
            " (Mamba) cannot be trained here"
        )
    return heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads


def layer_windows(config: Any) -> list[int | None]:
    """Of each layer, how many tokens a token sees by attention, itself among them; None: all before
    it."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    seen = {"sliding_attention": window} | dict.fromkeys(_WITHOUT_ATTENTION, 0)
    return [seen.get(kind) for kind in kinds]


def experts_per_token(layer: Any) -> int | None:
    """How many experts of a mixture a token is routed to; None: the model has none, or names
    them in a way not known here."""
    found = (getattr(layer, name, None) for name in _EXPERTS)
    return next((count for count in found if isinstance(count, int)), None)


def score_transforms(layer: Any) -> list[ScoreTransform]:
    """The forms of attention scores that a layer with this config may have: with its window and
    without, as models alternate, and as a tree of one row asks for them."""
    cap: float | None = getattr(layer, "attn_logit_softcapping", None)
    # Which kinds of models have sinks only their classes know.
    sinks = torch.zeros(1) if layer.model_type.startswith("gpt_oss") else None
    windows = {None, getattr(layer, "sliding_window", None)}
    return [ScoreTransform(window=window, softcap=cap, sinks=sinks) for window in windows]

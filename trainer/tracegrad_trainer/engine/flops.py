"""Floating-point operations that a step's model needs, however it was computed."""

from __future__ import annotations

from typing import Any

from torch import nn

from tracegrad_trainer.batches import MicroBatch, PackingRule
from tracegrad_trainer.engine.context_parallel import repeats_of
from tracegrad_trainer.engine.model.hf_config import (
    experts_per_token,
    layer_configs,
    layer_windows,
    query_heads,
)

# What a GPU computes while it exchanges a byte with another one of its machine: 40 % of an H100's
# peak of 989e12 operations a second, and 70 % of its NVLink's 450e9 bytes. Assumed, not measured.
_OPERATIONS_A_BYTE = 0.4 * 989e12 / (0.7 * 450e9)
_EXCHANGED_BYTES = 2  # of a number in bfloat16


def flops(model: nn.Module, batch: MicroBatch) -> float:
    """Of forward and backward: 2 a parameter and token forward, 4 backward (2 where the
    parameter is frozen), as in PaLM's MFU (arXiv 2204.02311, appendix B), and attention.

    What a step recomputes, pads or only looks at is no part of it. Embeddings are look-ups, the
    head works on targets alone, a mixture's experts on the tokens routed to them; causal
    attention of a row of L tokens is half of L x L, or L windows, and a tree's branches pay for
    what they see. Of recurrent layers the matrices are counted; what their state costs is not
    (about 1 % in the shapes of Qwen 3.5).
    """
    tokens, targets = batch.tokens, len(batch.target)
    body, head = _weights(model)
    return body * tokens + head * targets + 3 * _attention(model, batch)


def operations_per_token(model: nn.Module) -> float:
    """Of forward and backward of a token that is a target, without attention."""
    return sum(_weights(model))


def attention_operations(model: nn.Module) -> float:
    """Of the forward, of a token, for each token that it attends to: scores and their weighted sum,
    in the layers that see all before them."""
    config: Any = model.config
    shapes = [query_heads(layer) for layer in layer_configs(config)]
    each = zip(shapes, layer_windows(config), strict=True)
    return 4.0 * sum(heads * width for (heads, width), window in each if window is None)


def attention_parity(model: nn.Module) -> float:
    """Tokens of a row whose attention costs as much as all else; where no layer sees more than a
    window, more than any row has."""
    attended = attention_operations(model)
    return 2 * operations_per_token(model) / (3 * attended) if attended else 1e12


def packing_rule(model: nn.Module, group: int = 1) -> PackingRule:
    """By what rows cost in this model; `group`: so many ranks may share them."""
    return PackingRule(attention_parity(model), group=group, exchange=exchange_share(model, group))


def exchange_share(model: nn.Module, ranks: int) -> float:
    """What ranks of a group exchange of a token around attention (`ContextParallelAttention`), in
    time, as a share of all else that a token costs less attention."""
    exchanged = 0.0
    for layer in layer_configs(model.config):
        heads, width = query_heads(layer)
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        # Queries and what was attended to; keys and values; forward, and backward their gradients.
        exchanged += 2 * 2 * width * (heads + kv_heads * repeats_of(kv_heads, ranks))
    sent = _EXCHANGED_BYTES * exchanged * (ranks - 1) / ranks
    return _OPERATIONS_A_BYTE * sent / operations_per_token(model)


def _weights(model: Any) -> tuple[float, float]:
    """Operations a token of all matrices but the head, and of the head."""
    used = experts_per_token(model.config.get_text_config())  # unknown: all
    last = model.get_output_embeddings().weight
    apart = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(last)}
    body = 0.0
    for parameter in model.parameters():
        if id(parameter) in apart or parameter.ndim < 2:
            continue
        share = 1.0
        if parameter.ndim == 3:  # experts, stacked
            share = min(1.0, (used or parameter.shape[0]) / parameter.shape[0])
        body += _each(parameter) * share
    return body, _each(last)


def _each(parameter: nn.Parameter) -> float:
    return parameter.numel() * (6.0 if parameter.requires_grad else 4.0)


def _attention(model: Any, batch: MicroBatch) -> float:
    """Of the forward: scores and their weighted sums over what each token attends to."""
    # A token at position p attends to p + 1 tokens, in a row or on its branch, or to its window.
    before = batch.position_ids + 1
    windows = layer_windows(model.config)
    seen = {w: float((before if w is None else before.clip(max=w)).sum()) for w in set(windows)}
    shapes = [query_heads(layer) for layer in layer_configs(model.config)]
    each = zip(shapes, windows, strict=True)
    return 4.0 * sum(seen[window] * heads * width for (heads, width), window in each)

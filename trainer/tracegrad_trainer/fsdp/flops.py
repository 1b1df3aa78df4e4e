"""Floating-point operations that a step's model needs, however it was computed."""

from __future__ import annotations

from typing import Any

from torch import nn

from tracegrad_trainer.batches import MicroBatch


def flops(model: nn.Module, batch: MicroBatch) -> float:
    """Of forward and backward: 2 a parameter and token forward, 4 backward (2 where the
    parameter is frozen), as in PaLM's MFU (arXiv 2204.02311, appendix B), and attention.

    What a step recomputes, pads or only looks at is no part of it. The embedding is a look-up,
    the head works on targets alone, a mixture's experts on the tokens routed to them; causal
    attention of a row of L tokens is half of L x L, and a tree's branches pay for what they see.
    """
    tokens, targets = batch.tokens, len(batch.target)
    body, head = _weights(model)
    return body * tokens + head * targets + 3 * _attention(model, batch)


def _weights(model: Any) -> tuple[float, float]:
    """Operations a token of all matrices but the head, and of the head."""
    config = model.config.get_text_config()
    table = model.get_input_embeddings().weight
    last = model.get_output_embeddings().weight
    body = 0.0
    for parameter in model.parameters():
        if parameter is table or parameter is last or parameter.ndim < 2:
            continue
        share = 1.0
        if parameter.ndim == 3:  # experts, stacked
            share = min(1.0, config.num_experts_per_tok / parameter.shape[0])
        body += _each(parameter) * share
    return body, _each(last)


def _each(parameter: nn.Parameter) -> float:
    return parameter.numel() * (6.0 if parameter.requires_grad else 4.0)


def _attention(model: Any, batch: MicroBatch) -> float:
    """Of the forward: scores and their weighted sums over what each token attends to."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    # A token at position p attends to p + 1 tokens, in a row or on its branch.
    seen = float((batch.position_ids + 1).sum())
    found: float = 4.0 * heads * width * config.num_hidden_layers * seen
    return found

"""The value head: one number for each target, from the hidden state that it is predicted from.

It sits on the model itself, so that it is sharded, optimized and checkpointed with it; its
weights are no part of the model that is served or exported.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

VALUE_HEAD = "value_head"


def attach_value_head(model: nn.Module) -> nn.Module:
    """Put a value head on the model, before sharding. In place.

    It starts at zero: values of 0, whatever the hidden state, and the same on every rank.
    """
    assert not has_value_head(model)
    last: Any = model.get_output_embeddings()  # type: ignore[operator]
    weight: Tensor = last.weight
    head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.add_module(VALUE_HEAD, head)
    return model


def has_value_head(model: nn.Module) -> bool:
    return hasattr(model, VALUE_HEAD)


def is_value_parameter(parameter: str) -> bool:
    """Whether a parameter of this name is the value head's."""
    return parameter.startswith(VALUE_HEAD + ".")


def predict_values(model: nn.Module, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, " n"]:
    head: nn.Linear = getattr(model, VALUE_HEAD)
    found: Tensor = head(hidden)[:, 0]
    # No view: FSDP hangs its backward on what leaves the model.
    return found.to(torch.promote_types(hidden.dtype, torch.float32), copy=True)

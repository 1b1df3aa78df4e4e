"""torch.compile around each transformer block: blocks are alike, so one compilation serves all."""

from __future__ import annotations

import shutil

import torch
from torch import nn

from tracegrad_trainer.engine.model.hf_config import (
    experts_per_token,
    layer_configs,
    transformer_blocks,
)

# Tests that have no minute for it take one without code generation.
_BACKEND = "inductor"


def compile_blocks(model: nn.Module) -> None:
    """In place, before blocks are recomputed and sharded: what is compiled is what those call.
    Attention is called from between two compiled parts of a block.

    Raises:
        ValueError: the model is a mixture, or there is no compiler.
    """
    check_compiler()
    if any(experts_per_token(layer) for layer in layer_configs(model.config)):
        raise ValueError(
            f"fsdp.compile = true: {type(model).__name__} is a mixture, whose shapes depend on what"
            " its routers choose, and each would be compiled: set fsdp.compile = false"
        )
    for block in transformer_blocks(model):
        # Rows differ in length: one compilation for all.
        block.forward = torch.compile(block.forward, dynamic=True, backend=_BACKEND)


def check_compiler() -> None:
    """Raises ValueError: what torch.compile generates cannot be built here."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        raise ValueError(
            "fsdp.compile = true needs a C++ compiler: install g++ (Debian: apt-get install g++),"
            " or leave it out"
        )

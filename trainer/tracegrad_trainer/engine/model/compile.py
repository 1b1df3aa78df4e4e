"""torch.compile around each transformer block: blocks are alike, so one compilation serves all."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

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
    """Raises ValueError: what torch.compile generates for a CPU cannot be built here."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        raise ValueError(
            "fsdp.compile = true needs a C++ compiler: install g++ (Debian: apt-get install g++),"
            " or leave it out"
        )


def check_triton(what: str) -> None:
    """Raises ValueError: what Triton starts its kernels with cannot be built here; `what` needs
    them."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    scheme = sysconfig.get_default_scheme()
    # As Triton looks for it: Debian's local scheme has no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    headers = Path(sysconfig.get_path("include", scheme))
    lacks = [] if any(map(shutil.which, compilers)) else ["a C compiler (gcc or clang)"]
    if not (headers / "Python.h").is_file():
        lacks.append(f"Python's headers ({headers / 'Python.h'})")
    if lacks:
        version = sysconfig.get_python_version()
        raise ValueError(
            f"{what} needs {' and '.join(lacks)} on a GPU: install them (Debian: apt-get install"
            f" gcc python{version}-dev)"
        )

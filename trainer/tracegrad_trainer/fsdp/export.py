"""Whole weights out of the shards, under transformers' names."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from .lora import merged_tensors

# Beside the weights in a model folder, and not the trainer's to change.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


def full_tensors(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) one at a time; every rank must run through all of them.

    What is served: adapters are added to the weights beside them, tied weights come once under
    the name of the embedding, a value head does not come.
    """
    return merged_tensors(model, dtype)


def save_hf(
    model: nn.Module,
    folder: Path | str,
    *,
    companions_from: Path | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that `from_pretrained` and vLLM read; every rank calls, rank 0 writes.

    The folder appears whole or not at all, and replaces one that was there. Tokenizer, chat
    template and generation settings of the folder `companions_from` come along.

    Raises:
        OSError: it could not be written (on rank 0; the other ranks return).
    """
    first = dist.get_rank() == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in full_tensors(model, dtype):
        if first:
            weights[name] = tensor.cpu().contiguous()
    if first:
        # Only now may anything fail: the other ranks are out of the collectives.
        config: Any = copy.deepcopy(model.config)
        config.dtype = next(iter(weights.values())).dtype
        _write(Path(folder), weights, config, companions_from)


def _write(
    folder: Path, weights: dict[str, Tensor], config: Any, companions_from: Path | str | None
) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(partial)
    if companions_from is not None:
        copy_companions(companions_from, partial)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def copy_companions(folder: Path | str, into: Path) -> None:
    """Tokenizer, chat template and generation settings of a model folder."""
    for pattern in _COMPANIONS:
        for file in Path(folder).glob(pattern):
            if file.is_file():
                shutil.copy2(file, into / file.name)

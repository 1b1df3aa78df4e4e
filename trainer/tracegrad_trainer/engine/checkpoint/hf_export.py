"""Whole weights out of the shards, under the names of transformers or of model folders."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from tracegrad_trainer.engine.checkpoint.untrained_parts import add_untrained_parts
from tracegrad_trainer.engine.model.hf_config import transformer_blocks
from tracegrad_trainer.engine.model.lora import merged_tensors
from tracegrad_trainer.utils.scratch_folder import replacing_folder

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
    the name of the embedding, a value head does not come. Buffers that folders hold come too:
    nobody trains them, but a model without them is another one.
    """
    yield from merged_tensors(model, dtype)
    for name, buffer in persistent_buffers(model):
        floats = buffer.is_floating_point()
        yield name, buffer.to(dtype) if dtype is not None and floats else buffer


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """That folders hold; whole on every rank."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def as_hf_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """`full_tensors`, under the names and in the pieces that the model's folder has them in.

    transformers stacks a mixture's experts when it loads them, and names parts of some models
    differently; vLLM reads some of that, and what folders hold always. Not a collective.
    """
    kept = {id(block) for block in transformer_blocks(model)}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if id(module) in kept)

    def block_of(pair: tuple[str, Tensor]) -> str:
        return next((prefix for prefix in prefixes if pair[0].startswith(prefix)), "")

    # What is taken apart or put together lies within a block, and a block's copies are few.
    for _, group in groupby(tensors, key=block_of):
        yield from revert_weight_conversion(model, dict(group)).items()


def save_hf(
    model: nn.Module,
    folder: Path | str,
    *,
    companions_from: Path | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that `from_pretrained` and vLLM read; every rank calls, rank 0 writes.

    The folder appears whole or not at all, and replaces one that was there. Tokenizer, chat
    template, generation settings and what is not trained of the folder `companions_from` come
    along.

    Raises:
        OSError, ValueError: it could not be written (on rank 0; the other ranks return).
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
        tensors = dict(as_hf_tensors(model, weights.items()))
        with replacing_folder(Path(folder)) as partial:
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(partial)
            if companions_from is not None:
                copy_tokenizer_files(companions_from, partial)
                add_untrained_parts(Path(companions_from), partial, config.dtype)


def copy_tokenizer_files(folder: Path | str, into: Path) -> None:
    """Tokenizer, chat template and generation settings of a model folder."""
    for pattern in _COMPANIONS:
        for file in Path(folder).glob(pattern):
            if file.is_file():
                shutil.copy2(file, into / file.name)

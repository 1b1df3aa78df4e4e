"""`trainer export`: a checkpoint as a folder that transformers and vLLM load.

In one process on the host's memory, whatever number of ranks wrote the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from tracegrad.store import Ledger, Store, StoreError
from tracegrad_trainer import out_folder
from tracegrad_trainer.coordinator import resume_folder
from tracegrad_trainer.fsdp import CheckpointError, build_model, checkpoints, lora
from tracegrad_trainer.fsdp.checkpoint import load_weights
from tracegrad_trainer.fsdp.export import copy_companions
from tracegrad_trainer.fsdp.whole import step_of
from tracegrad_trainer.quiet import no_progress_bars
from tracegrad_trainer.settings import TrainerSettings

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    out: Path
    step: int | None = None  # None: the last committed one
    dtype: str = "bfloat16"
    merged: bool = False
    shard_size: str = "5GB"


class ExportError(RuntimeError):
    """Why nothing was written, in one line."""


def export(settings: TrainerSettings, request: Request, console: Console) -> int:
    try:
        with no_progress_bars():  # what is said is the line below
            step = write(settings, request)
    except (ExportError, CheckpointError, StoreError, ValueError, OSError) as error:
        console.print(Text(f"trainer export: {error}", style="red"), soft_wrap=True)
        return 1
    what = "the adapter" if settings.fsdp.lora and not request.merged else "the weights"
    console.print(Text(f"{what} of step {step}: {request.out}"), soft_wrap=True)
    return 0


def write(settings: TrainerSettings, request: Request) -> int:
    """Writes `request.out` whole or not at all -> the step whose weights they are.

    Raises:
        ExportError, ValueError: the request is no use.
        CheckpointError: the checkpoint is not whole.
    """
    if request.dtype not in DTYPES:
        raise ExportError(f"--dtype {request.dtype}: use one of {', '.join(DTYPES)}")
    if request.merged and settings.fsdp.lora is None:
        raise ExportError("--merged: the model is trained without LoRA, so there is no adapter")
    out_folder.check(request.out, (settings.model, settings.reference_folder))
    folder = checkpoint_to_export(settings, request.step)
    model = weights_of(settings, folder)
    dtype = getattr(torch, request.dtype)
    out = request.out.resolve()
    if settings.fsdp.lora is not None and not request.merged:
        lora.save_adapter(model, out, dtype)
        copy_companions(settings.model, out)
        return step_of(folder)
    if settings.fsdp.lora is not None:
        merge(model)
    _write_whole(model, settings.model, out, dtype, request.shard_size)
    return step_of(folder)


def checkpoint_to_export(settings: TrainerSettings, step: int | None) -> Path:
    """Raises ExportError, CheckpointError: there is none."""
    if step is not None:
        folder = settings.checkpoints / f"step-{step:08d}"
        if not folder.exists():
            there = [step_of(one) for one in checkpoints(settings.checkpoints)]
            raise ExportError(
                f"--step {step}: no such checkpoint in {settings.checkpoints};"
                f" there are {', '.join(map(str, there)) or 'none'}"
            )
        return folder
    with Store.open(settings.proxy.store, create=False) as store:
        last = Ledger(store).last_step()
    if last is None:
        raise ExportError("no step was taken yet: the weights are those of the model folder")
    return resume_folder(last, settings)


def weights_of(settings: TrainerSettings, folder: Path) -> nn.Module:
    """The model of a checkpoint in the host's memory; a value head is left out."""
    here = settings.fsdp.model_copy(update={"device": "cpu", "attention": "sdpa"})
    model = build_model(settings.model, here)
    named = dict(model.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    load_weights(trained, folder)
    return model


def merge(model: nn.Module) -> None:
    """The adapters into the weights beside them, in place; then they are gone."""
    merged = {name: tensor.clone() for name, tensor in lora.merged_tensors(model)}
    for name, module in list(model.named_modules()):
        base = getattr(module, "base_layer", None)
        if base is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, base)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(merged[name])
    if hasattr(model, "peft_config"):
        del model.peft_config
    if hasattr(model, "_hf_peft_config_loaded"):
        model._hf_peft_config_loaded = False  # type: ignore[assignment]


def _write_whole(
    model: Any, companions: Path, out: Path, dtype: torch.dtype, shard_size: str
) -> None:
    """transformers' own writer: it splits the weights, and gives a mixture's experts the names
    that they have in files."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(partial, max_shard_size=shard_size)
    copy_companions(companions, partial)
    if out.exists():
        shutil.rmtree(out)
    os.replace(partial, out)

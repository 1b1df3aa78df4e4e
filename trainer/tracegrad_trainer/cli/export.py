"""`trainer export`: a checkpoint as a folder that transformers and vLLM load.

In one process on the host's memory, whatever number of ranks wrote the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from tracegrad.store import StepHistory, Store, StoreError, StoreMissing
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError, build_model, list_checkpoints
from tracegrad_trainer.engine.checkpoint.hf_export import copy_tokenizer_files
from tracegrad_trainer.engine.checkpoint.manifest import checkpoint_step, may_exist
from tracegrad_trainer.engine.checkpoint.save_load import load_weights
from tracegrad_trainer.engine.checkpoint.untrained_parts import add_untrained_parts
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.launch.session import check_output_dir
from tracegrad_trainer.rl.committed_checkpoint import (
    CommittedCheckpoint,
    check_base_model,
    committed_checkpoint_of,
    resume_checkpoint,
    without_checkpoint,
)
from tracegrad_trainer.utils.console import no_progress_bars, print_error
from tracegrad_trainer.utils.scratch_folder import replacing_folder

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    out: Path
    step: int | None = None  # None: the last committed one
    dtype: str = "bfloat16"
    merged: bool = False
    shard_size: str = "5GB"


class ExportError(RuntimeError):
    """Why nothing was written, in one line."""


def export(settings: TrainerSettings, request: ExportRequest, console: Console) -> int:
    try:
        with no_progress_bars():  # the line below is the output
            step = write_export(settings, request)
    except (ExportError, CheckpointError, StoreError, ValueError, OSError) as error:
        print_error(f"trainer export: {error}", console)
        return 1
    what = "the adapter" if settings.fsdp.lora and not request.merged else "the weights"
    console.print(Text(f"{what} of step {step}: {request.out}"), soft_wrap=True)
    return 0


def write_export(settings: TrainerSettings, request: ExportRequest) -> int:
    """Writes `request.out` whole or not at all -> the step whose weights they are.

    Raises:
        ExportError, ValueError: the request is no use.
        CheckpointError: the checkpoint is not whole.
    """
    if request.dtype not in DTYPES:
        raise ExportError(f"--dtype {request.dtype}: use one of {', '.join(DTYPES)}")
    if request.merged and settings.fsdp.lora is None:
        raise ExportError("--merged: the model is trained without LoRA, so there is no adapter")
    check_output_dir(request.out, (settings.model, settings.reference_folder))
    committed = checkpoint_to_export(settings, request.step)
    model = load_checkpoint_model(settings, committed.folder, digest=committed.digest)
    dtype = getattr(torch, request.dtype)
    out = request.out.resolve()
    if settings.fsdp.lora is not None and not request.merged:
        lora.save_adapter(model, out, dtype)
        copy_tokenizer_files(settings.model, out)
        return committed.step
    if settings.fsdp.lora is not None:
        merge_adapters(model)
    _write_whole(model, settings.model, out, dtype, request.shard_size)
    return committed.step


def checkpoint_to_export(settings: TrainerSettings, step: int | None) -> CommittedCheckpoint:
    """Raises ExportError, CheckpointError: there is none, or it is not the committed one."""
    try:
        with Store.open(settings.proxy.store, create=False) as store:
            if step is None:
                found = resume_checkpoint(store, settings)
            else:
                found = _of_step(store, settings, step)
    except StoreMissing:
        if step is None:
            raise
        folder = settings.checkpoints / f"step-{step:08d}"  # all that there is to go by
        if not folder.exists():
            raise ExportError(_no_such(settings, step)) from None
        return CommittedCheckpoint(step, folder, None)
    if found is None:
        raise ExportError("no step was taken yet: the weights are those of the model folder")
    return found


def _of_step(store: Store, settings: TrainerSettings, step: int) -> CommittedCheckpoint:
    record = StepHistory(store).step(step)
    if record is None:
        raise ExportError(_no_such(settings, step))
    if record.checkpoint is None:
        raise ExportError(f"--step {step}: {without_checkpoint(store, step)}")
    if not any(
        may_exist(folder)
        for folder in (settings.checkpoints / f"step-{step:08d}", Path(record.checkpoint))
    ):
        raise ExportError(_no_such(settings, step))
    found = committed_checkpoint_of(record, settings.checkpoints)
    check_base_model(store, settings, found, weights=False)
    return found


def _no_such(settings: TrainerSettings, step: int) -> str:
    there = [checkpoint_step(one) for one in list_checkpoints(settings.checkpoints)]
    if step in there:
        return f"--step {step}: the checkpoint in {settings.checkpoints} was never committed"
    return (
        f"--step {step}: no such checkpoint in {settings.checkpoints};"
        f" there are {', '.join(map(str, there)) or 'none'}"
    )


def load_checkpoint_model(
    settings: TrainerSettings, folder: Path, *, digest: str | None = None
) -> nn.Module:
    """The model of a checkpoint in the host's memory; a value head is left out. `digest`: what
    its manifest's must be."""
    # What a GPU alone has cannot be asked for; what suits no packed rows is refused for training.
    wanted = settings.fsdp.attention
    kept = wanted if wanted in ("packed", "sdpa", "eager") else "auto"
    here = settings.fsdp.model_copy(update={"device": "cpu", "attention": kept})
    model: Any = build_model(settings.model, here)
    model.set_attn_implementation("eager")  # ours takes packed rows alone
    named = dict(model.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    load_weights(trained, folder, digest=digest)
    return model  # type: ignore[no-any-return]


def merge_adapters(model: nn.Module) -> None:
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
    that they have in files. What is not trained comes from the model's own folder."""
    model.to(dtype)
    model.config.dtype = dtype
    with replacing_folder(out) as partial:
        model.save_pretrained(partial, max_shard_size=shard_size)
        copy_tokenizer_files(companions, partial)
        add_untrained_parts(companions, partial, dtype)

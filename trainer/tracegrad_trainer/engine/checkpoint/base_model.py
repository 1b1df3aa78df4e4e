"""Which model folder a checkpoint belongs to, and with which adapters.

A LoRA checkpoint holds adapters alone, and one of full weights the policy alone: the reference, the
tokenizer and the adapters' base stay in the model folder. With another model in it training would
go on from weights that were never trained together.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model.safetensors_files import read_header, weight_files

# Of each tensor so many bytes are read, from its middle: all of one that differs by training do.
_SAMPLE = 512


class BaseModelRecord(BaseModel):
    """As a checkpoint's manifest has it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: str
    weights: str | None = None  # `weights_digest`; None: not known
    lora: LoraSettings | None = None

    @classmethod
    def of(cls, folder: Path, lora: LoraSettings | None) -> BaseModelRecord:
        return cls(path=str(folder), weights=weights_digest(folder), lora=lora)


def weights_digest(folder: Path) -> str | None:
    """Of names, types, shapes and samples of all tensors in a folder's safetensors, however they
    are divided into files; reads some hundred bytes a tensor. None: there are none to read."""
    found: dict[str, bytes] = {}
    try:
        for path in weight_files(folder):
            with path.open("rb") as file:
                found |= _tensors(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not found:
        return None
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(json.dumps(name).encode() + found[name])
    return digest.hexdigest()


def _tensors(file: IO[bytes]) -> dict[str, bytes]:
    """Name -> type, shape and sample."""
    found: dict[str, bytes] = {}
    for name, (dtype, shape, start, end) in read_header(file).items():
        size = min(_SAMPLE, end - start)
        file.seek((start + end - size) // 2)
        what = json.dumps([dtype, shape]).encode()
        found[name] = what + hashlib.sha256(file.read(size)).digest()
    return found


def base_model_difference(
    recorded: BaseModelRecord, folder: Path, lora: LoraSettings | None, *, weights: bool = True
) -> str | None:
    """The setting that does not fit, and why, in words that "; to …" can follow; None: all fit.
    `weights` False: where the checkpoint has all weights itself, those in the folder may be others.
    """
    if recorded.lora is None and lora is not None:
        return "fsdp.lora: the checkpoints are of full weights, and no adapters can go on from them"
    if recorded.lora is not None and lora is None:
        return (
            f"fsdp.lora: the checkpoints hold adapters of rank {recorded.lora.rank}, and without it"
            " full weights would be trained"
        )
    if recorded.lora is not None and lora is not None:
        for name in LoraSettings.model_fields:
            then, now = getattr(recorded.lora, name), getattr(lora, name)
            if _in_any_order(then) != _in_any_order(now):
                return (
                    f"fsdp.lora.{name} = {now!r}: the checkpoints hold adapters made with {then!r}"
                )
    if recorded.lora is None and not weights:
        return None
    was = recorded.weights or _digest_elsewhere(recorded, folder)
    if was is None or was == weights_digest(folder):
        return None
    if recorded.path == str(folder):
        return f"model = {str(folder)!r}: the weights in it are others than those that were trained"
    return f"model = {str(folder)!r}: the checkpoints were trained from {recorded.path!r}"


def _in_any_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | tuple) else value


def _digest_elsewhere(recorded: BaseModelRecord, folder: Path) -> str | None:
    """Of the folder that an earlier version trained from, if it is another and still there."""
    return None if recorded.path == str(folder) else weights_digest(Path(recorded.path))

"""The files that carry weights from the trainer to vLLM: safetensors in shared memory.

Two versions are kept: the one that is served, to return to, and the one under way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tracegrad.events import Json
from tracegrad_trainer.inference.weight_directory import PREFIX
from tracegrad_trainer.inference.zero_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tracegrad_trainer.utils.scratch_folder import ScratchFolder

_SHARD_BYTES = 256 << 20


class WeightFiles:
    """A folder of ours under `directory` (see `weight_directory`). vLLM must see it under the same
    path."""

    def __init__(self, directory: Path) -> None:
        self._scratch = ScratchFolder(PREFIX, directory)
        self.folder = self._scratch.path

    @property
    def lock(self) -> int:
        """A descriptor: the folder is nobody's to remove while some process has it open."""
        return self._scratch.lock

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Path]:
        """Writes (checkpoint name, whole tensor) pairs; the files, each of 256 MiB or one tensor
        more.

        ValueError naming the tensor if it holds NaN or infinity; OSError if there is no room.
        """
        target = self.folder / str(version)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        paths: list[Path] = []
        shard: dict[str, torch.Tensor] = {}
        memory: set[int] = set()
        size = 0
        for name, tensor in tensors:
            shard[name] = _plain(name, tensor, memory)
            size += tensor.nbytes
            if size >= _SHARD_BYTES:
                paths.append(_save(shard, target / f"{len(paths)}.safetensors"))
                shard, memory, size = {}, set(), 0
        if shard:
            paths.append(_save(shard, target / f"{len(paths)}.safetensors"))
        return paths

    def write_adapter(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], config: Json
    ) -> list[Path]:
        """The same of an adapter, as peft has it: one file, and the configuration beside it."""
        target = self.folder / str(version)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        whole: dict[str, torch.Tensor] = {}
        memory: set[int] = set()
        for name, tensor in tensors:
            whole[name] = _plain(name, tensor, memory)
        (target / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return [_save(whole, target / ADAPTER_WEIGHTS)]

    def keep_only(self, *versions: int) -> None:
        kept = set(map(str, versions))
        for folder in self.folder.iterdir():
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._scratch.close()


def _plain(name: str, tensor: torch.Tensor, memory: set[int]) -> torch.Tensor:
    """On the CPU, in one piece, and not sharing memory with another of the same file; `memory`:
    where those are, who stay there meanwhile. Its own is added."""
    plain = tensor.detach().cpu().contiguous()
    if not _is_finite(plain):
        raise ValueError(f"{name} holds values that are not finite")
    if plain.untyped_storage().data_ptr() in memory:
        plain = plain.clone()
    memory.add(plain.untyped_storage().data_ptr())
    return plain


def _is_finite(tensor: torch.Tensor) -> bool:
    """In one pass and without a temporary: whatever is not finite makes a sum so."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float16:  # a sum of many would leave its range
        return all(bool(torch.isfinite(end)) for end in tensor.aminmax())
    # Of its own dtype: on a CPU a sum of bfloat16 into float32 takes nine times as long.
    return bool(torch.isfinite(tensor.sum()))


def _save(shard: dict[str, torch.Tensor], path: Path) -> Path:
    try:
        save_file(shard, path)
    except SafetensorError as error:
        needed = sum(tensor.nbytes for tensor in shard.values())
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"cannot write {needed >> 20} MiB of weights to {path.parent.parent} "
            f"({free >> 20} MiB free): {error}"
        ) from None
    return path

"""What of a model's folder the trainer leaves out: a vision tower, heads for tokens further ahead.

A causal LM may be a part of what its folder holds. An exported folder takes the rest over, so that
it can stand wherever the first one stood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from tracegrad_trainer.engine.model.hf_weights import HfWeights, readable_by_parts
from tracegrad_trainer.engine.model.memory import meta_model
from tracegrad_trainer.engine.model.safetensors_files import read_header, weight_files

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FIRST, _REST = "model-trained.safetensors", "model-untrained.safetensors"
_DTYPES = ("dtype", "torch_dtype")


def add_untrained_parts(base: Path, into: Path, dtype: torch.dtype) -> None:
    """Into a folder of exported weights: the tensors of `base` that are no part of the causal LM,
    in `dtype`, and the config that speaks of them.

    Raises:
        OSError, ValueError: one of the folders cannot be read, or written to.
    """
    config: Any = AutoConfig.from_pretrained(base, local_files_only=True)
    if not readable_by_parts(base, config):
        return
    left_out = HfWeights(base, meta_model(base)).untrained
    if left_out:
        save_file(_read(base, left_out, dtype), into / _REST, metadata={"format": "pt"})
        _write_index(into)
    written = json.loads((into / "config.json").read_text(encoding="utf-8"))
    if written["model_type"] != config.model_type:
        _write_config(base, into, dtype)


def served_beside(base: Path, model: nn.Module) -> list[str]:
    """Of a model that sees: names of the tensors that are served and not trained, which are the
    vision tower's. None of a model that is the whole of its folder: vLLM loads no heads for tokens
    further ahead unless it is told to. `model` is as transformers makes it, on any device.

    Raises:
        OSError, ValueError: the folder cannot be read.
    """
    config: Any = AutoConfig.from_pretrained(base, local_files_only=True)
    trained: Any = model.config
    if config.model_type == trained.model_type or not readable_by_parts(base, config):
        return []
    return [name for name in HfWeights(base, model).untrained if not name.startswith("mtp.")]


def elements_beside(base: Path, model: nn.Module) -> int:
    """How many numbers they are. Raises as `served_beside`."""
    left_out = set(served_beside(base, model))
    count = 0
    for path in weight_files(base) if left_out else []:
        with path.open("rb") as file:
            shapes = {name: shape for name, (_, shape, _, _) in read_header(file).items()}
        count += sum(math.prod(shapes[name]) for name in left_out & shapes.keys())
    return count


def read_tensors(base: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """As the files have them, one at a time. Raises OSError, ValueError."""
    wanted = set(names)
    for path in weight_files(base) if wanted else []:
        with safe_open(path, "pt") as file:
            for name in sorted(wanted.intersection(file.keys())):
                yield name, file.get_tensor(name)


def _read(base: Path, names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in read_tensors(base, names)
    }


def _write_index(folder: Path) -> None:
    """Over all files. One whole file would be taken for all there is, whatever an index says."""
    if (folder / _WHOLE).is_file():
        (folder / _WHOLE).rename(folder / _FIRST)
        files = [folder / _FIRST]
    else:
        files = weight_files(folder)
    places, size = {}, 0
    for path in [*files, folder / _REST]:
        with path.open("rb") as file:
            for name, (_, _, begins, ends) in read_header(file).items():
                places[name] = path.name
                size += ends - begins
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(base: Path, into: Path, dtype: torch.dtype) -> None:
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    for part in (config, *(one for one in config.values() if isinstance(one, dict))):
        part.update({key: name for key in _DTYPES if key in part})
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

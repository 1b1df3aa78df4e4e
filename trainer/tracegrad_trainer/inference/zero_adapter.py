"""The adapter that vLLM starts with, in peft's files: it changes nothing.

From it on the name that calls give stands for the model with its adapter, and what it stands for
changes with each push. A second name may stand for a candidate's. Nothing here loads torch:
`trainer serve` writes it before vLLM starts.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tracegrad_trainer.utils.scratch_folder import replacing_folder

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# vLLM takes no adapter without tensors, and leaves out those of a layer that is not there, if the
# last part of its name is one that the model has.
_LAYER = "o_proj"
_NOWHERE = f"base_model.model.nowhere.{_LAYER}"


def zero_adapter(link: Path) -> Path:
    """Where it lies, for a vLLM that serves what `link` leads to."""
    return link.with_name(f"zero_{link.name}")


def write_zero_adapter(link: Path) -> None:
    """Writes it, and makes `link` lead to it. OSError: it cannot be written."""
    folder = zero_adapter(link)
    folder.parent.mkdir(parents=True, exist_ok=True)
    zero = np.zeros((1, 1), np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [_LAYER],
    }
    for left in link.parent.glob(f"{link.name}.*"):
        shutil.rmtree(left, ignore_errors=True)  # copies of a vLLM that has ended
    with replacing_folder(folder) as partial:
        pair = {f"{_NOWHERE}.lora_{part}.weight": zero for part in "AB"}
        save_file(pair, partial / ADAPTER_WEIGHTS)
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    link_adapter(link, folder)


def keep_adapter(link: Path, folder: Path) -> None:
    """Makes `link` lead to a copy of `folder`, which may be gone before vLLM reads it again.
    Of this process's copies the last one stays; vLLM must stand still."""
    copy = link.with_name(f"{link.name}.{os.getpid()}")
    with replacing_folder(copy) as partial:
        shutil.copytree(folder, partial, dirs_exist_ok=True)
    link_adapter(link, copy)


def link_adapter(link: Path, folder: Path) -> None:
    """`link` leads to `folder`, at once; several processes may do so side by side."""
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(folder.resolve(), target_is_directory=True)
    made.replace(link)

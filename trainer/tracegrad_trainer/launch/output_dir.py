"""Whether a model may be written to a folder: all that is there is replaced."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_CONFIGS = ("config.json", "adapter_config.json")


def check_output_dir(out: Path, models: Iterable[Path]) -> None:
    """`models` are those that training begins with, which are never replaced.

    Raises:
        ValueError: the folder holds something else than an earlier model, or one of `models`.
    """
    if any(out.resolve() == model.resolve() for model in models):
        raise ValueError(f"--out {out}: training begins with the model in it; name another folder")
    if out.exists() and not _is_a_model(out) and _holds_something(out):
        raise ValueError(f"--out {out}: it holds something else; name a new folder")


def _is_a_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _CONFIGS) and any(folder.glob("*.safetensors"))


def _holds_something(out: Path) -> bool:
    return not out.is_dir() or any(out.iterdir())

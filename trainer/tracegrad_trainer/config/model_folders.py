"""The folders of the models that settings name, by path or as on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tracegrad.chat.model_folder import HubName, ModelNotFound


class FindModel(Protocol):
    """Of a model that is named as on the Hub, its folder. Raises ModelNotFound."""

    def __call__(self, name: str, *, pinned_by: Path | None) -> Path: ...


def check_model_folder(path: Path) -> None:
    """Raises ValueError: what of a Hugging Face folder is missing."""
    if not path.is_dir():
        raise ValueError(
            f"{path}: there is no such folder; give a Hugging Face model folder, or a name on"
            " the Hub (owner/name)"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise ValueError(
                f"{path} has no {name}: give a Hugging Face model folder, or a name on the Hub"
            )
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no *.safetensors: give a folder with weights")
    if missing := _missing_shards(path):
        raise ValueError(
            f"{path} lacks {len(missing)} of its files of weights, such as {missing[0]}:"
            " download it again"
        )


def _missing_shards(folder: Path) -> list[str]:
    """Files that the index of its weights names and that are not there: a broken-off download."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return []
    return sorted(name for name in shards if not (folder / name).is_file())


def model_folders(data: dict[str, Any], before: dict[str, Any], find: FindModel) -> dict[str, Path]:
    """Absolute folders for `model` and `reference`; names of the Hub become snapshots, of the
    commit that `before` has. What is neither stays as it is: the field's check names it.

    Raises ValueError: a name that cannot be had, and what `find` raises.
    """
    found = {}
    for name in ("model", "reference"):
        value = data.get(name)
        if not isinstance(value, str | Path):
            continue
        last = before.get(name)
        pin = Path(last) if isinstance(last, str) else None
        if (folder := Path(value).expanduser()).exists():
            found[name] = folder.resolve()
        elif HubName.parse(str(value)) is not None:
            try:
                found[name] = find(str(value), pinned_by=pin)
            except ModelNotFound as error:
                raise ValueError(f"{name}: {error}") from None
    return found


def last_resolved(state_dir: Path) -> dict[str, Any]:
    """The settings of the last `trainer serve` or `step` in this folder, or else of the last
    `sft`, if there was one."""
    for name in ("settings.json", "sft.json"):
        try:
            found = json.loads((state_dir / "run" / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            trainer: dict[str, Any] = found.get("trainer", found)
            return trainer
    return {}

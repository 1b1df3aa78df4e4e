"""Models of the Hub as far as a plan needs them: config, tokenizer, and what the headers of their
weights say. Gigabytes are not fetched for it.

An outline is a folder like a model's: its safetensors have their headers and sizes, and no numbers
(holes, which take no room on the disk). It does not outlast the plan: nobody is to load it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tracegrad.chat.model_folder import (
    HubName,
    commit_of_snapshot,
    explained,
    find_model_folder,
)

# What a safetensors file says of its tensors, by their names.
Header = Mapping[str, Mapping[str, Any]]


class ModelOutlines:
    """As `find_model_folder`, for `load_settings`. The outlines are removed with `with`.

    Attributes:
        names: what they are of (`owner/name@commit`), by their folders.
    """

    def __init__(self) -> None:
        self._temp = tempfile.TemporaryDirectory(prefix="tracegrad-plan-")
        self.names: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._temp.cleanup()

    def find(self, name: str, *, pinned_by: Path | None = None) -> Path:
        """The snapshot, where all of it is in the cache; a model whose weights say nothing of
        themselves is fetched. Raises ModelNotFound."""
        snapshot = find_model_folder(name, weights=False, pinned_by=pinned_by)
        hub = HubName.parse(name)
        if hub is None or _is_whole(snapshot):
            return snapshot
        commit = commit_of_snapshot(snapshot, hub.repository)
        headers = _headers(hub.repository, commit)
        if headers is None:
            return find_model_folder(name, pinned_by=pinned_by)
        outline = Path(self._temp.name).resolve() / hub.repository.replace("/", "--") / str(commit)
        if not outline.exists():
            outline.mkdir(parents=True)
            for file in snapshot.iterdir():
                if file.suffix != ".safetensors":
                    (outline / file.name).symlink_to(file.resolve())
            for file_name, header in headers.items():
                write_outline(outline / file_name, header)
            _write_index(outline, headers)
        self.names[str(outline)] = f"{hub.repository}@{commit}"
        return outline


def _is_whole(snapshot: Path) -> bool:
    from tracegrad_trainer.engine.model.safetensors_files import weight_files

    try:
        files = weight_files(snapshot)
    except (OSError, ValueError):
        return False
    return bool(files) and all(file.is_file() for file in files)


def _headers(repository: str, commit: str | None) -> Mapping[str, Header] | None:
    """By file; None: it has no safetensors of the usual names, or some in other folders. Raises
    ModelNotFound."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = HfApi().get_safetensors_metadata(repository, revision=commit).files_metadata
    except (NotASafetensorsRepoError, SafetensorsParsingError):
        return None
    except Exception as error:  # as of `find_model_folder`
        raise explained(repository, commit, error) from error
    # Names are the repository's, and are to lead nowhere else.
    if not all(Path(name).name == name for name in found):
        return None
    return {
        file: {name: asdict(one) for name, one in f.tensors.items()} for file, f in found.items()
    }


def _write_index(outline: Path, headers: Mapping[str, Header]) -> None:
    places = {name: file for file, header in headers.items() for name in header}
    index = outline / "model.safetensors.index.json"
    if "model.safetensors" not in headers:
        index.unlink(missing_ok=True)  # a link into the cache
        index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def write_outline(path: Path, header: Header) -> None:
    """A safetensors file with this header, and a hole in place of the numbers."""
    tensors = {
        name: {field: one[field] for field in ("dtype", "shape", "data_offsets")}
        for name, one in header.items()
    }
    text = json.dumps(tensors).encode()
    size = max((one["data_offsets"][1] for one in header.values()), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)

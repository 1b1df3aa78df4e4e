"""A model folder's safetensors: which files they are, and what their headers say. Without torch."""

from __future__ import annotations

import json
import operator
import struct
from pathlib import Path
from typing import IO, Any

_NO_HEADER = 1 << 30  # bytes that no header has


def weight_files(folder: Path) -> list[Path]:
    """Those that transformers loads: other files beside them (`consolidated.safetensors`, variants
    of another precision) are no part of the model.

    Raises:
        OSError, ValueError: their index cannot be read.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors: {error!r}") from error
    return sorted(folder.glob("*.safetensors"))


def read_header(file: IO[bytes]) -> dict[str, tuple[str, list[int], int, int]]:
    """Of a safetensors file: name -> type, shape, first byte in the file and the one behind the
    last. Format: 8 bytes of length, a JSON header, the tensors' bytes
    (https://huggingface.co/docs/safetensors).

    Raises:
        OSError, ValueError: it is none.
    """
    try:
        [length] = struct.unpack("<Q", file.read(8))
        if length > _NO_HEADER:
            raise ValueError("its header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        first = 8 + length
        found = {}
        for name, one in header.items():
            begins, ends = one["data_offsets"]
            shape = [operator.index(size) for size in one["shape"]]
            found[name] = (one["dtype"], shape, first + begins, first + ends)
        return found
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{file.name} is no safetensors file: {error}") from error

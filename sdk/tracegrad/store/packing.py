"""Tokens, log-probabilities and JSON as compressed bytes, and the digest of a token context."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from array import array
from typing import Any

import orjson
import zstandard

_LEVEL = 3
_contexts = threading.local()  # a zstd context serves one thread at a time


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_contexts, "compressor"):
        _contexts.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    compressor: zstandard.ZstdCompressor = _contexts.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _contexts.decompressor
    return decompressor


def _little_endian(values: array[Any]) -> bytes:
    assert values.itemsize == 4, values.typecode
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def pack(values: array[int] | array[float]) -> bytes:
    """Little-endian 4-byte items, zstd-compressed; no bytes at all for no items."""
    return _compressor().compress(_little_endian(values)) if values else b""


def _unpack(typecode: str, blob: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    if blob:
        values.frombytes(_decompressor().decompress(blob))
        if sys.byteorder == "big":
            values.byteswap()
    return values


def unpack_ids(blob: bytes) -> array[int]:
    return _unpack("i", blob)


def unpack_logprobs(blob: bytes) -> array[float]:
    return _unpack("f", blob)


class ContextDigest:
    """BLAKE2b (128 bits) over token ids, fed piece by piece."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, ids: array[int]) -> ContextDigest:
        self._hash.update(_little_endian(ids))
        return self

    def value(self) -> bytes:
        return self._hash.digest()


def dump_json(value: Any) -> str:
    """JSON text of anything: what JSON cannot say becomes its `str`, NaN becomes null."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return json.dumps(value, default=str)


def pack_json(value: Any) -> bytes | None:
    return None if value is None else _compressor().compress(dump_json(value).encode())


def unpack_json(blob: bytes | None) -> Any:
    return None if blob is None else json.loads(_decompressor().decompress(blob))

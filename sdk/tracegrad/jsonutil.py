"""JSON text of anything: what JSON cannot say becomes its `str`, NaN becomes null."""

from __future__ import annotations

import json
from typing import Any

import orjson


def dump_json(value: Any) -> str:
    return encode_json(value).decode()


def text_or_json(value: Any) -> str:
    """A text as it is, all else as JSON."""
    return value if isinstance(value, str) else dump_json(value)


def encode_json(value: Any) -> bytes:
    """As UTF-8."""
    try:
        return encode_with_orjson(value)
    except TypeError:
        return encode_with_python(value)


def encode_with_orjson(value: Any) -> bytes:
    """TypeError: it holds integers beyond 64 bits, or lone surrogates."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)


def encode_with_python(value: Any) -> bytes:
    """The slow way, for all that orjson refuses. NaN and infinities stay words of their own."""
    return json.dumps(value, default=str).encode()

"""One JSON object a line, UTF-8."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

from tracegrad.events import Json
from tracegrad.jsonutil import encode_json
from tracegrad.transfer.validation import InvalidObject

# What orjson refuses or rounds: lone surrogates, integers beyond 64 bits.
_ODD = re.compile(rb"\\u[dD][89a-fA-F]|[0-9]{19}")


def line_of(value: Json) -> bytes:
    return encode_json(value) + b"\n"


def read_lines(file: BinaryIO) -> Iterator[tuple[int, int, Any]]:
    """Line number from 1, its size in bytes, and the object, or the `InvalidObject` that it is.
    Empty lines are skipped."""
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            yield number, len(line), parse(line)
        except InvalidObject as error:
            yield number, len(line), error


def parse(line: bytes) -> Any:
    """Raises InvalidObject."""
    try:
        return json.loads(line) if _ODD.search(line) else orjson.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(": line 1")[0]
        raise InvalidObject("line", f"it is no JSON ({reason}); write one object a line") from None

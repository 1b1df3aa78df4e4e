"""One JSON object a line, UTF-8; or one object that is spread over the whole file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

from tracegrad.events import Json
from tracegrad.jsonutil import encode_json
from tracegrad.transfer.validation import InvalidObject

_LONE_BRACE = re.compile(rb"\s*\{[ \t\r]*\n")
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


def is_one_document(start: bytes) -> bool:
    """Whether a file that begins so is one object, indented: no line of JSONL is a lone brace."""
    return _LONE_BRACE.match(start) is not None


def read_document(file: BinaryIO) -> Iterator[tuple[int, int, Any]]:
    """As `read_lines`, of a file with one object."""
    text = file.read()
    try:
        yield 1, len(text), parse(text)
    except InvalidObject as error:
        yield 1, len(text), error


def parse(line: bytes) -> Any:
    """Raises InvalidObject."""
    try:
        return json.loads(line) if _ODD.search(line) else orjson.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(": line 1")[0]
        raise InvalidObject("line", f"it is no JSON ({reason}); write one object a line") from None

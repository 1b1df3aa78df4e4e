"""How much memory facts take up while they wait to be written: an estimate that costs little."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tracegrad.events import Event

# Bytes of a value that holds no text; what is said of a fact with more values than are looked at.
_VALUE = 64
_MOST_VALUES = 20_000
_LARGE = 16 << 20


def estimate_bytes(fact: Event) -> int:
    """In bytes. Texts and token arrays count as long as they are, everything else alike."""
    size, looked_at = 0, 0
    todo: list[Any] = [getattr(fact, each.name) for each in fields(fact)]
    while todo:
        value = todo.pop()
        size += _VALUE
        looked_at += 1
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, array):
            size += len(value) * value.itemsize
        elif looked_at + len(todo) > _MOST_VALUES:
            return size + _LARGE
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
    return size

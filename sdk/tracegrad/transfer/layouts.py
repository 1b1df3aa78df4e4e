"""Rows as other trainers read them. Layouts come from packages, by entry points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import BinaryIO

from tracegrad.events import Json
from tracegrad.store.copy.export_records import RolloutRecord

ENTRY_POINT_GROUP = "tracegrad.layouts"

# What a column holds: "text", "integer", "number", "flag", "ids" (int32 list), "logprobs" (float32
# list), "mask" (int8 list), "json" (a text with JSON), "file" (bytes, in JSON as base64), "texts",
# "messages" (chat messages, with the fields that occur), or an object of such columns.
Column = str | Mapping[str, "Column"]
# Why something has no row, counted: {"no_reward": 3}.
ReasonCounter = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """`rows` makes the rows of one group of rollouts, and counts what it leaves out.

    `text`: whether it needs requests and responses. `files` are formats besides JSONL and Parquet:
    the ending, and what writes all rows to a file.
    `reader` says which code reads the rows, for people.
    """

    name: str
    reader: str
    columns: Mapping[str, Column]
    rows: Callable[[Sequence[RolloutRecord], ReasonCounter], Iterator[Json]]
    text: bool = True
    files: Mapping[str, Callable[[BinaryIO, Iterator[Json]], object]] = field(default_factory=dict)


class LayoutUnknown(LookupError):
    """No installed package has a layout of this name."""


def layout_names() -> list[str]:
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names)


def find_layout(name: str) -> ExportLayout:
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        layout = entry.load()
        assert isinstance(layout, ExportLayout), f"{entry.value} is no layout"
        return layout
    names = ", ".join(layout_names()) or "none is installed"
    raise LayoutUnknown(f"{name!r}; there are: {names}")

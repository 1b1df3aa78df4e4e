"""Rollouts in formats of others. Readers come from packages, by entry points, as layouts do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from tracegrad.events import Json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.validation import InvalidObject

T = TypeVar("T")

ENTRY_POINT_GROUP = "tracegrad.readers"
FOLDER_ENTRY_POINT_GROUP = "tracegrad.folder_readers"
# `Turn.untrainable` of a turn that its producer took out of the loss, or a part of it.
MASKED = "masked"


@dataclass(frozen=True, slots=True)
class ForeignRollout:
    """A rollout of another format. `as_record` takes the time that it has where it says none: that
    of its first import, so that importing it again changes nothing."""

    rollout_id: str
    as_record: Callable[[float], RolloutRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReader:
    """`matches` says whether an object is of this format, `read` what it holds; it raises
    InvalidObject, which names the field."""

    name: str
    matches: Callable[[Json], bool]
    read: Callable[[Json], ForeignRollout]


@cache
def foreign_readers() -> tuple[ForeignReader, ...]:
    return _installed(ENTRY_POINT_GROUP, ForeignReader)


def reader_of(value: Json) -> ForeignReader | None:
    """None: no installed package knows objects like this one."""
    return next((each for each in foreign_readers() if each.matches(value)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReader:
    """`matches` says whether a folder is of this format. `objects`: the file and the object, or
    what is wrong with it, of each rollout in it; a reader of objects takes them from there."""

    name: str
    matches: Callable[[Path], bool]
    objects: Callable[[Path], Iterator[tuple[Path, Json | InvalidObject]]]


@cache
def folder_readers() -> tuple[FolderReader, ...]:
    return _installed(FOLDER_ENTRY_POINT_GROUP, FolderReader)


def folder_reader_of(folder: Path) -> FolderReader | None:
    """None: no installed package knows folders like this one."""
    return next((each for each in folder_readers() if each.matches(folder)), None)


def _installed(group: str, kind: type[T]) -> tuple[T, ...]:
    found = []
    for entry in sorted(entry_points(group=group), key=lambda each: each.name):
        reader = entry.load()
        assert isinstance(reader, kind), f"{entry.value} is no {kind.__name__}"
        found.append(reader)
    return tuple(found)

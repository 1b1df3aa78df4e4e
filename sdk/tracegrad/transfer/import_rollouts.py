"""Objects into a store, in batches of bounded size. Importing again changes nothing.

A batch is one transaction. One that the store refuses is tried again rollout by rollout, so that
only those that are at fault are left out.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from tracegrad.events import Span
from tracegrad.store.copy.export_records import RolloutRecord, VersionRecord
from tracegrad.store.copy.import_records import (
    ImportCounts,
    import_rollouts,
    import_spans,
    import_steps,
    import_versions,
    opening_times,
)
from tracegrad.store.errors import EventRejected
from tracegrad.store.store import Store
from tracegrad.store.types import StepRecord
from tracegrad.transfer import jsonl, parquet
from tracegrad.transfer.chat_conversations import ImportedConversation
from tracegrad.transfer.deserialize import ImportedObject, read_object
from tracegrad.transfer.readers import ForeignRollout, folder_reader_of, folder_readers
from tracegrad.transfer.validation import InvalidObject

_BATCH_BYTES = 8 << 20
_BATCH_ROLLOUTS = 256
# Rollouts that need not say when they were.
_FromElsewhere = ImportedConversation | ForeignRollout


class ImportStopped(Exception):
    """One line: the file, the line, the field and the fix."""


@dataclass(frozen=True, slots=True)
class _ObjectAt:
    where: str
    read: ImportedObject


@dataclass(slots=True)
class RolloutImport:
    """`skip_bad`: what is broken is counted by reason, and the rest goes on. `untrained`: without
    what another store did with the rollouts, so that all their turns wait to be trained here."""

    store: Store
    skip_bad: bool = False
    untrained: bool = False
    added: ImportCounts = field(default_factory=ImportCounts)
    rejected: Counter[str] = field(default_factory=Counter)
    _batch: dict[str, _ObjectAt] = field(default_factory=dict)  # by rollout
    _bytes: int = 0
    _steps: set[int] = field(default_factory=set)  # that were read

    def file(self, name: str, file: BufferedReader) -> None:
        """Raises ImportStopped; what came before it is stored."""
        unit, objects = _objects_of(name, file)
        try:
            for number, size, value in objects:
                self._object(name + unit.format(number), value, size)
        except parquet.NotParquet as error:
            self.flush()
            raise ImportStopped(f"{name}: {error}") from error
        self.flush()

    def folder(self, folder: Path) -> None:
        """Raises ImportStopped; what came before it is stored."""
        if (reader := folder_reader_of(folder)) is None:
            known = ", ".join(each.name for each in folder_readers()) or "none"
            raise ImportStopped(
                f"{folder}: no folder of a known format ({known}); name the files in it"
            )
        for file, value in reader.objects(folder):
            self._object(str(file), value, file.stat().st_size if file.exists() else 0)
        self.flush()

    def flush(self) -> None:
        batch, self._batch, self._bytes = self._batch, {}, 0
        if batch:
            self._add_rollouts(list(batch.values()))

    def _object(self, where: str, value: Any, size: int) -> None:
        try:
            if isinstance(value, InvalidObject):
                raise value
            self._take(_ObjectAt(where, read_object(value)), size)
        except (InvalidObject, EventRejected) as error:
            self.flush()
            self._broken(where, str(error))

    def _take(self, found: _ObjectAt, size: int) -> None:
        match found.read:
            case RolloutRecord() | ImportedConversation() | ForeignRollout():
                self._check_steps(found.read)
                if found.read.rollout_id in self._batch:
                    self.flush()
                self._batch[found.read.rollout_id] = found
                self._bytes += size
                if self._bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_ROLLOUTS:
                    self.flush()
            case Span():
                self.added.add(import_spans(self.store, [found.read]))
            case StepRecord() if not self.untrained:
                self.added.add(import_steps(self.store, [found.read]))
                self._steps.add(found.read.step)
            case VersionRecord() if not self.untrained:
                self.added.add(import_versions(self.store, [found.read]))

    def _check_steps(self, read: RolloutRecord | _FromElsewhere) -> None:
        """Steps have only numbers: those of the file must have been read, and be these."""
        if self.untrained or isinstance(read, _FromElsewhere):
            return
        if missing := read.steps - self._steps:
            raise InvalidObject(
                "trained_step",
                f"step {min(missing)} was not read before it; import the whole file, or with "
                "--untrained",
            )

    def _add_rollouts(self, batch: Sequence[_ObjectAt]) -> None:
        try:
            self.added.add(
                import_rollouts(self.store, self._copies([found.read for found in batch]))
            )
        except EventRejected as error:
            if len(batch) == 1:
                self._broken(batch[0].where, str(error))
                return
            for found in batch:
                self._add_rollouts([found])

    def _copies(self, reads: Sequence[ImportedObject]) -> list[RolloutRecord]:
        now = time.time()
        undated = [read.rollout_id for read in reads if isinstance(read, _FromElsewhere)]
        here = opening_times(self.store, undated) if undated else {}
        copies = []
        for read in reads:
            if isinstance(read, _FromElsewhere):
                copies.append(read.as_record(here.get(read.rollout_id, now)))
            elif isinstance(read, RolloutRecord):
                copies.append(read.untrained() if self.untrained else read)
        return copies

    def _broken(self, where: str, error: str) -> None:
        if not self.skip_bad:
            raise ImportStopped(f"{where}: {error}")
        self.rejected[re.sub(r"\[\d+\]", "[]", error.partition(": ")[0])] += 1


def _objects_of(name: str, file: BufferedReader) -> tuple[str, Iterator[tuple[int, int, Any]]]:
    """How a place in it is named, and its objects; formats are known by how the file begins."""
    if file.peek(4)[:4] == parquet.MAGIC:
        if not file.seekable():
            raise ImportStopped(f"{name}: Parquet cannot be read from a pipe; name the file")
        return ", row {}", parquet.read_rows(file)
    if jsonl.is_one_document(file.peek(64)):
        return ":{}", jsonl.read_document(file)
    return ":{}", jsonl.read_lines(file)

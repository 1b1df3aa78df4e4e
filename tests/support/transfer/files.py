"""Stores written to files, and read again."""

from __future__ import annotations

from pathlib import Path

from tracegrad.store import Store
from tracegrad.transfer import jsonl, parquet, parquet_columns
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad.transfer.import_rollouts import RolloutImport


def exported(store: Store, path: Path, **how: object) -> Path:
    rows = RolloutExport(store=store, **how).rollouts()  # type: ignore[arg-type]
    with path.open("wb") as file:
        if path.suffix == ".parquet":
            parquet.write(file, rows, parquet_columns.ROLLOUT)
        else:
            file.writelines(map(jsonl.line_of, rows))
    return path


def imported(store: Store, path: Path, **how: bool) -> RolloutImport:
    importing = RolloutImport(store, **how)
    with path.open("rb") as file:
        importing.file(path.name, file)
    return importing

"""Parquet, by PyArrow: rows that stream in, row groups that stream out, and back.

A column {"*": columns} is a list of objects; "json" is a text with JSON in it.
"""

from __future__ import annotations

import json
import tempfile
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from tracegrad.events import Json
from tracegrad.jsonutil import dump_json
from tracegrad.transfer import jsonl
from tracegrad.transfer.layouts import Column
from tracegrad.transfer.parquet_columns import ROLLOUT, has_messages, message_fields, with_messages
from tracegrad.transfer.schema import FORMAT
from tracegrad.transfer.validation import InvalidObject, without_nulls

MAGIC = b"PAR1"
# A row group holds about so many bytes before compression, or so many rows.
_GROUP_BYTES = 8 << 20
_GROUP_ROWS = 5_000
_READ_ROWS = 16


class ParquetMissing(Exception):
    """PyArrow is not installed."""

    def __init__(self) -> None:
        super().__init__("Parquet needs PyArrow: pip install 'tracegrad[parquet]'")


class NotParquet(Exception):
    """The file cannot be read as Parquet."""


def write(file: BinaryIO, rows: Iterable[Json], columns: Mapping[str, Column]) -> int:
    """How many rows. Raises ParquetMissing."""
    _pyarrow()
    if not has_messages(columns):
        return _write(file, rows, columns)
    # Which fields messages have is known when the last one was seen; rows wait on the disk.
    with tempfile.TemporaryFile() as spool:
        for row in rows:
            spool.write(jsonl.line_of(row))
        spool.seek(0)
        fields = message_fields(map(jsonl.parse, spool), columns)
        spool.seek(0)
        return _write(file, map(jsonl.parse, spool), with_messages(columns, fields))


def _rollout_row(value: Json) -> Json:
    """An object of `export --rollouts` as a row of `parquet_columns.ROLLOUT`."""
    if value["kind"] == "rollout":
        return value
    other = {key: item for key, item in value.items() if key not in ("tracegrad", "kind")}
    return {"tracegrad": value["tracegrad"], "kind": value["kind"], "other": other}


def read_rows(file: BinaryIO) -> Iterator[tuple[int, int, Any]]:
    """Row number from 1, its size in bytes, about, and the object, or the `InvalidObject`.

    Raises ParquetMissing or NotParquet.
    """
    _pyarrow()
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        read = _from_row if "tracegrad" in parquet.schema_arrow.names else without_nulls
        for batch in parquet.iter_batches(batch_size=_READ_ROWS):
            for row in batch.to_pylist():
                number += 1
                try:
                    yield number, _size(row), read(row)
                except InvalidObject as error:
                    yield number, _size(row), error
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise NotParquet(f"it is no Parquet file that can be read ({reason})") from error


def schema(columns: Mapping[str, Column]) -> Any:
    """Their types, as a PyArrow schema; "messages" have been spelled out. Raises ParquetMissing."""
    _pyarrow()
    import pyarrow

    return pyarrow.schema([(name, _type(column)) for name, column in columns.items()])


def _write(file: BinaryIO, rows: Iterable[Json], columns: Mapping[str, Column]) -> int:
    import pyarrow
    import pyarrow.parquet

    arrow = schema(columns).with_metadata({"tracegrad": str(FORMAT)})
    if "tracegrad" in columns:  # lines of several kinds in one table
        rows = map(_rollout_row, rows)
    count = 0
    with pyarrow.parquet.ParquetWriter(file, arrow, compression="zstd") as writer:
        for group in _groups(_cell(row, columns) for row in rows):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=arrow))
            count += len(group)
    return count


def _groups(rows: Iterable[Json]) -> Iterator[list[Json]]:
    group: list[Json] = []
    size = 0
    for row in rows:
        group.append(row)
        size += _size(row)
        if size >= _GROUP_BYTES or len(group) >= _GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _type(column: Column) -> Any:
    import pyarrow as pa

    if isinstance(column, str):
        return {
            "text": pa.string(),
            "json": pa.string(),
            "integer": pa.int64(),
            "number": pa.float64(),
            "flag": pa.bool_(),
            "ids": pa.list_(pa.int32()),
            "logprobs": pa.list_(pa.float32()),
            "mask": pa.list_(pa.int8()),
            "pairs": pa.list_(pa.list_(pa.int64())),
            "file": pa.binary(),
            "texts": pa.list_(pa.string()),
        }[column]
    if "*" in column:
        return pa.list_(_type(column["*"]))
    return pa.struct([(name, _type(inner)) for name, inner in column.items()])


def _cell(value: Any, column: Column) -> Any:
    """The value as a cell of the column."""
    if value is None:
        return None
    if column == "json":
        return dump_json(value)
    if column == "file":
        return b64decode(value)
    if column == "logprobs":
        # Null in JSON only; Parquet has a word for what is not a number.
        return [float("nan") if item is None else item for item in value]
    if isinstance(column, str):
        return value
    if "*" in column:
        return [_cell(item, column["*"]) for item in value]
    return {name: _cell(value.get(name), inner) for name, inner in column.items()}


def _from_row(row: Json) -> Json:
    """A row of `parquet_columns.ROLLOUT` as the object that it was. Raises InvalidObject."""
    other = row.pop("other", None)
    if row.get("kind") != "rollout":
        rest = None if other is None else _json(other, "other")
        return {"tracegrad": row["tracegrad"], "kind": row.get("kind"), **(rest or {})}
    return {name: _parsed(value, ROLLOUT.get(name, "text"), name) for name, value in row.items()}


def _parsed(value: Any, column: Column, where: str) -> Any:
    """A cell as it was. What has another type than the column stays, for its reader to refuse."""
    if column == "json" and value is not None:
        return _json(value, where)
    if not isinstance(column, str) and isinstance(value, list):
        inner = column["*"]
        return [_parsed(item, inner, f"{where}[{n}]") for n, item in enumerate(value)]
    if not isinstance(column, str) and isinstance(value, dict):
        return {
            name: _parsed(item, column.get(name, "text"), f"{where}.{name}")
            for name, item in value.items()
        }
    return value


def _json(value: Any, where: str) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        raise InvalidObject(where, "it is no JSON; write a JSON text") from None


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        if value and isinstance(value[0], dict | list):
            return sum(map(_size, value))
        return 8 * len(value)
    return len(value) if isinstance(value, str | bytes) else 8


def _pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise ParquetMissing from None

"""Rows and dataclasses whose fields are named as the columns, and questions about many keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, TypeVarTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute

T = TypeVar("T")
Columns = TypeVarTuple("Columns")
Table = type[DeclarativeBase]


def chunks(items: Sequence[T], size: int = 500) -> Iterator[Sequence[T]]:
    """Databases bound the number of parameters in a statement."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def rows_of_keys(
    connection: Connection,
    query: Select[*Columns],
    column: InstrumentedAttribute[Any],
    keys: Collection[Any],
) -> Iterator[Row[*Columns]]:
    """The rows of `query` whose `column` is one of `keys`, in as many statements as that takes:
    the query's order holds within each."""
    for some in chunks([*keys]):
        yield from connection.execute(query.where(column.in_(some)))


@cache
def common_names(kind: type, table: Table) -> tuple[str, ...]:
    """Of the dataclass's fields and the table's columns."""
    return tuple(each.name for each in fields(kind) if each.name in table.__table__.columns)


def select_fields(kind: type, table: Table) -> Select[*tuple[Any, ...]]:
    """The columns that the dataclass `kind` has fields for."""
    return select(*(table.__table__.columns[name] for name in common_names(kind, table)))


def load(
    connection: Connection, kind: Callable[..., T], query: Select[*tuple[Any, ...]]
) -> list[T]:
    """A `kind` made of each row."""
    return [kind(**row) for row in connection.execute(query).mappings()]


def count_rows(
    connection: Connection,
    table: Table,
    *where: ColumnElement[bool] | InstrumentedAttribute[bool],
) -> int:
    return connection.scalar(select(func.count()).select_from(table).where(*where)) or 0


def column_values(record: Any, table: Table) -> dict[str, Any]:
    """The fields of a dataclass that the table has columns for."""
    kind: type = type(record)
    return {name: getattr(record, name) for name in common_names(kind, table)}

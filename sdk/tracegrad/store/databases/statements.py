"""What each database says its own way, in one form: inserts that meet a row with the same key,
and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

Insert = sqlite.Insert | postgresql.Insert
# Both have the same methods; only their types differ.
_INSERT: Mapping[str, Callable[..., Any]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


def insert_new(connection: Connection, table: type[DeclarativeBase]) -> Insert:
    """INSERT that leaves a row with the same key as it is."""
    return _insert_new(connection.dialect.name, table)


def upsert(connection: Connection, table: type[DeclarativeBase], key: str) -> Insert:
    """INSERT that replaces the other columns of a row with the same key."""
    return _upsert(connection.dialect.name, table, key)


# Built once: SQLAlchemy finds what it compiled by the statement's structure.
@cache
def _insert_new(backend: str, table: type[DeclarativeBase]) -> Insert:
    statement: Insert = _INSERT[backend](table).on_conflict_do_nothing()
    return statement


@cache
def _upsert(backend: str, table: type[DeclarativeBase], key: str) -> Insert:
    statement = _INSERT[backend](table)
    columns = {c.name: c for c in statement.excluded if c.name != key}
    updating: Insert = statement.on_conflict_do_update(index_elements=[key], set_=columns)
    return updating


_POSTGRESQL_CLOCK = select(func.extract("epoch", func.clock_timestamp()))


def server_time(connection: Connection) -> float:
    """What leases end by: seconds since the epoch, at this moment and not at the transaction's
    beginning.

    Trainers on several machines share a PostgreSQL server, whose clock it is. SQLite is for one
    machine, and its clock is that machine's.
    """
    if connection.dialect.name == "postgresql":
        return float(connection.execute(_POSTGRESQL_CLOCK).scalar_one())
    return time.time()

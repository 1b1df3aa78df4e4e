"""Of the database itself: its own checks, its tables, its disk."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, Table, inspect, select
from sqlalchemy.engine import Inspector

from tracegrad.store.databases.base import Database
from tracegrad.store.databases.upkeep import upkeep_of
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.models import Base

# Less of the disk is a risk: neither the log of a busy store nor a step's commit should fill it.
_LEAST_BYTES = 1 << 30

_BY_HAND = "the tables were changed by hand: restore the last good copy"


def database_checks(connection: Connection, database: Database) -> Iterator[Finding]:
    upkeep = upkeep_of(database)
    for fault in upkeep.faults(connection):
        yield Finding(check="database", message=fault.what, fix=fault.fix, broken=fault.broken)
    left = upkeep.disk_left()
    if left is not None and left < _LEAST_BYTES:
        yield Finding(
            check="disk",
            message=f"{left / (1 << 20):,.0f} MiB are left on the disk",
            fix="make room, or let old rollouts go: tracegrad prune",
            broken=False,
        )


def schema_checks(connection: Connection) -> Iterator[Finding]:
    """Tables, columns and indexes as this revision has them."""
    inspector = inspect(connection)
    there = set(inspector.get_table_names())
    for table in Base.metadata.sorted_tables:
        if table.name not in there:
            yield _schema(table.name, f"the table {table.name} is missing", _BY_HAND)
        else:
            yield from _table_checks(inspector, table)


def _table_checks(inspector: Inspector, table: Table) -> Iterator[Finding]:
    columns = {column["name"] for column in inspector.get_columns(table.name)}
    for column in table.columns:
        if column.name not in columns:
            yield _schema(table.name, f"the column {table.name}.{column.name} is missing", _BY_HAND)
    indexes = {index["name"] for index in inspector.get_indexes(table.name)}
    for index in table.indexes:
        if index.name not in indexes:
            names = ", ".join(column.name for column in index.columns)
            yield _schema(
                table.name,
                f"the index {index.name} is missing: the store becomes slow",
                f"tracegrad doctor --fix makes it: CREATE INDEX {index.name} ON {table.name} "
                f"({names})",
            )


def _schema(subject: str, message: str, fix: str) -> Finding:
    return Finding(check="schema", subject=subject, message=message, fix=fix)


_RESTORE = "restore the last good copy of the store"
_BARE = "tracegrad doctor --fix gives it a rollout without a name"
_ORPHAN_FIXES = {
    ("turn_ledger", "turns"): "tracegrad doctor --fix takes it out: its turn is gone",
    **{
        (table.name, "rollouts"): _BARE
        for table in Base.metadata.tables.values()
        if any(key.column.table.name == "rollouts" for key in table.foreign_keys)
    },
}


def orphan_checks(connection: Connection) -> Iterator[Finding]:
    """Rows that refer to others which are not there. Databases forbid it; copies by hand, and
    tools that switch the check off, do not."""
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            other = key.column.table.alias()
            there = other.c[key.column.name]
            query = (
                select(*table.primary_key.columns, key.parent)
                .select_from(table.outerjoin(other, key.parent == there))
                .where(key.parent.is_not(None), there.is_(None))
            )
            for row in connection.execute(query):
                *subject, missing = row
                yield Finding(
                    check="orphans",
                    subject=f"{table.name} {' '.join(map(str, subject))}",
                    message=f"{key.parent.name} is {missing}, and {key.column.table.name} has none",
                    fix=_ORPHAN_FIXES.get((table.name, key.column.table.name), _RESTORE),
                )

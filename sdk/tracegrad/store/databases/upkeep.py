"""What care of a store asks of its database: its size, its faults, room given back."""

from __future__ import annotations

import shutil
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from tracegrad.store.databases.base import BUSY_TIMEOUT_S, Database
from tracegrad.store.databases.postgresql import PostgreSQL
from tracegrad.store.databases.sqlite import SQLite
from tracegrad.store.models import Base

# Of SQLite's file, what must be free before a rewrite (VACUUM) is worth it.
_MIN_FREE_SHARE = 0.2
# How long its log may take to be emptied, which needs a moment without readers.
_EMPTIED_S = 10.0
_FAULTS = 20
# PostgreSQL's settings without which what is acknowledged may be lost with the power.
_DURABLE = {
    "fsync": "the server's crash may destroy the whole database",
    "full_page_writes": "a loss of power may leave pages half written",
    "synchronous_commit": "the server's crash may take back the last acknowledged turns",
}
_TOTAL = "SELECT " + " + ".join(
    f"pg_total_relation_size('{name}')" for name in Base.metadata.tables
)


@dataclass(frozen=True, slots=True)
class DatabaseFault:
    """`broken`: what is stored cannot be trusted; else it is a risk."""

    what: str
    fix: str
    broken: bool


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Bytes of the files before and after; `note` where not all could be done."""

    before: int
    after: int
    note: str = ""


class Upkeep(ABC):
    @abstractmethod
    def used_bytes(self, connection: Connection) -> int | None:
        """Without free room inside; None: the database does not know."""

    @abstractmethod
    def disk_left(self) -> int | None:
        """Bytes free where the files are; None: it cannot be seen from here."""

    @abstractmethod
    def faults(self, connection: Connection) -> list[DatabaseFault]: ...

    @abstractmethod
    def reclaim(self, *, whole: bool) -> Reclaimed:
        """Make room that is free inside the database usable for others.

        `whole`: by rewriting it, so that nothing of what was deleted is left in the files.
        """


def upkeep_of(database: Database) -> Upkeep:
    if isinstance(database, SQLite):
        return _SQLiteUpkeep(database)
    assert isinstance(database, PostgreSQL)
    return _PostgreSQLUpkeep(database)


@contextmanager
def _driver(database: Database) -> Iterator[Any]:
    """A connection of the driver's own: VACUUM runs in no transaction."""
    engine = database.engine(busy_timeout_s=BUSY_TIMEOUT_S)
    try:
        with database.one_line_errors(), closing(engine.raw_connection()) as raw:
            yield raw.driver_connection
    finally:
        engine.dispose()


class _SQLiteUpkeep(Upkeep):
    def __init__(self, database: SQLite) -> None:
        self._database = database
        self._path = Path(database.describe())

    def used_bytes(self, connection: Connection) -> int:
        pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
        return pages * _pragma(connection, "page_size")

    def disk_left(self) -> int:
        return shutil.disk_usage(self._path.absolute().parent).free

    def faults(self, connection: Connection) -> list[DatabaseFault]:
        lines = connection.exec_driver_sql(f"PRAGMA integrity_check({_FAULTS})").scalars()
        fix = (
            "restore the last good copy; what can still be read of this one comes out with "
            f"sqlite3 {self._path} .recover"
        )
        return [DatabaseFault(" ".join(line.split()), fix, True) for line in lines if line != "ok"]

    def reclaim(self, *, whole: bool) -> Reclaimed:
        before = self._size()
        note = ""
        with _driver(self._database) as raw, closing(raw.cursor()) as cursor:
            try:
                free, pages = _value(cursor, "freelist_count"), _value(cursor, "page_count")
                if whole or free > _MIN_FREE_SHARE * pages:
                    note = self._vacuum(cursor, pages - free)
                else:
                    note = f"{free / max(pages, 1):.0%} of the file is free: it is used again"
                note = note or _truncate_wal(cursor)
            except sqlite3.OperationalError as error:
                note = f"{error}; the room is used again all the same. Later: tracegrad prune"
        return Reclaimed(before, self._size(), note)

    def _vacuum(self, cursor: sqlite3.Cursor, pages: int) -> str:
        # A copy beside the file, and once more in the log.
        needed = 2 * pages * _value(cursor, "page_size")
        if (left := self.disk_left()) < needed:
            return f"rewriting the file needs {needed:,} bytes, and the disk has {left:,} left"
        # Not bit by bit (incremental_vacuum): that takes time quadratic in what is free.
        cursor.execute("VACUUM")
        return ""

    def _size(self) -> int:
        wal = self._path.with_name(self._path.name + "-wal")
        return sum(file.stat().st_size for file in (self._path, wal) if file.exists())


class _PostgreSQLUpkeep(Upkeep):
    def __init__(self, database: PostgreSQL) -> None:
        self._database = database

    def used_bytes(self, connection: Connection) -> None:
        return None

    def disk_left(self) -> None:
        return None

    def faults(self, connection: Connection) -> list[DatabaseFault]:
        faults = []
        for name, risk in _DURABLE.items():
            if connection.exec_driver_sql(f"SHOW {name}").scalar_one() == "off":
                fix = f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf();"
                faults.append(DatabaseFault(f"{name} is off: {risk}", fix, False))
        return faults

    def reclaim(self, *, whole: bool) -> Reclaimed:
        # VACUUM FULL would lock every proxy out; room that is free inside is used again.
        with _driver(self._database) as raw:
            raw.autocommit = True
            with closing(raw.cursor()) as cursor:
                before = self._size(cursor)
                for name in Base.metadata.tables:
                    cursor.execute(f"VACUUM (ANALYZE) {name}")
                return Reclaimed(before, self._size(cursor))

    def _size(self, cursor: Any) -> int:
        return int(cursor.execute(_TOTAL).fetchone()[0])


def _truncate_wal(cursor: sqlite3.Cursor) -> str:
    """What is in the log goes into the file, whose end is cut off then."""
    deadline = time.monotonic() + _EMPTIED_S
    while True:
        busy, *_ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not busy:
            return ""
        if time.monotonic() > deadline:
            return "others read and write all the time: the files shrink with their next pause"
        time.sleep(0.05)


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())


def _value(cursor: sqlite3.Cursor, name: str) -> int:
    [value] = cursor.execute(f"PRAGMA {name}").fetchone()
    return int(value)

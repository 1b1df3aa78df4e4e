"""The one place that knows which database it is: URLs, transactions, upserts, its errors.

Reading transactions are deferred. Writing ones take the database's write lock when they
begin (`BEGIN IMMEDIATE`), so that whatever a writing transaction reads stays true until it
commits; the ledger relies on that. Another database joins by giving the same promise here.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase

from tracegrad.store.errors import StoreMissing, StoreUnavailable
from tracegrad.store.packing import dump_json

BUSY_TIMEOUT_S = 30.0
_WRITE = "tracegrad_write"


def parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ValueError(f"store: {url!r} is no URL; write sqlite:///PATH") from None
    if parsed.get_backend_name() != "sqlite" or parsed.get_driver_name() != "pysqlite":
        raise ValueError(
            f"store: {parsed.drivername!r} is not a database it can use; write sqlite:///PATH"
        )
    if not parsed.database or parsed.database == ":memory:":
        raise ValueError("store: it needs a file that other processes can open: sqlite:///PATH")
    return parsed


def describe(url: URL) -> str:
    """How messages name the store; no password in it."""
    return url.database or url.render_as_string()


def prepare(url: URL, *, create: bool) -> None:
    """Make the folder of a new store, or say that there is none."""
    path = Path(url.database or "")
    if path.exists():
        return
    if not create:
        raise StoreMissing(f"no store at {path.absolute()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"store {path}: {error}") from error


def make_engine(url: URL, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
        json_serializer=dump_json,
        pool_size=4,
        max_overflow=60,
        pool_timeout=busy_timeout_s,
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def for_writing(engine: Engine) -> Engine:
    """The same engine, whose transactions take the write lock when they begin."""
    return engine.execution_options(**{_WRITE: True})


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy says BEGIN, not the driver
    cursor = connection.cursor()
    _use_wal(cursor)
    # FULL: a commit is flushed before it is acknowledged. It survives the end of any process and
    # of the system; a loss of power too, if the disk does not claim flushes that it only caches.
    cursor.execute("PRAGMA synchronous=FULL")
    # Pages go from the log into the file by 16 MB: those that are written again and again go once.
    cursor.execute("PRAGMA wal_autocheckpoint=4000")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    # Two processes that turn a new file to WAL at once: one is told "locked" without any wait.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def insert_new(table: type[DeclarativeBase]) -> Insert:
    """INSERT that leaves a row with the same key as it is."""
    return insert(table).on_conflict_do_nothing()


def upsert(table: type[DeclarativeBase], key: str) -> Insert:
    """INSERT that replaces the other columns of a row with the same key."""
    statement = insert(table)
    columns = {c.name: c for c in statement.excluded if c.name != key}
    return statement.on_conflict_do_update(index_elements=[key], set_=columns)


@contextmanager
def one_line_errors(url: URL) -> Iterator[None]:
    """The database's own failures as `StoreUnavailable`; mistakes of ours stay what they are."""
    try:
        yield
    except (exc.IntegrityError, exc.ProgrammingError, exc.DataError, exc.InterfaceError):
        raise
    except exc.DBAPIError as error:
        raise StoreUnavailable(f"store {describe(url)}: {error.orig}") from error
    except exc.TimeoutError as error:
        raise StoreUnavailable(f"store {describe(url)}: no free connection") from error

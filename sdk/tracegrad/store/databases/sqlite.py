"""A file beside the agent: SQLite in WAL mode.

Appending and exclusive transactions take the file's write lock when they begin (`BEGIN
IMMEDIATE`), so that both are the only writer until they commit. Readers never wait.

A file that was removed stays open, and SQLite would go on writing into what nobody finds any more;
a new connection would make an empty one in its place. Here neither happens: a transaction begins
only in the file that has the name now, and only `prepare` makes one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from sqlalchemy import URL, Connection, Engine, create_engine, event

from tracegrad.private_files import (
    STATE_FOLDER,
    private_file,
    private_folder,
    restrict_permissions,
)
from tracegrad.store.databases.base import BUSY_TIMEOUT_S, Database
from tracegrad.store.databases.json_columns import json_text, json_value
from tracegrad.store.errors import StoreForeign, StoreMissing, StoreUnavailable

_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"


class SQLite(Database):
    def __init__(self, url: URL) -> None:
        if not url.database or url.database == ":memory:":
            raise ValueError("store: it needs a file that other processes can open: sqlite:///PATH")
        super().__init__(url)

    def describe(self) -> str:
        assert self.url.database is not None
        return self.url.database

    def prepare(self, *, create: bool) -> None:
        path = Path(self.describe())
        if path.is_dir():
            raise StoreUnavailable(f"store {path}: it is a folder")
        if not path.exists():
            if not create:
                raise StoreMissing(f"no store at {path.absolute()}")
            self._make(path)
        _refuse_foreign(path)  # before anything of it is changed
        # SQLite gives its log and shared memory the mode of the database; older ones may have
        # another.
        for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            with suppress(FileNotFoundError):
                restrict_permissions(file)
        if path.absolute().parent.name == STATE_FOLDER:
            restrict_permissions(path.absolute().parent)

    def _make(self, path: Path) -> None:
        try:
            if not path.parent.is_dir():
                private_folder(path.parent)
            private_file(path)
        except OSError as error:
            raise StoreUnavailable(f"store {path}: {error}") from error

    def engine(self, *, busy_timeout_s: float) -> Engine:
        path = Path(self.describe()).absolute()  # the process may change its directory
        engine = create_engine(
            self.url,
            creator=lambda: _open_file(path, busy_timeout_s),
            json_serializer=json_text,
            json_deserializer=json_value,
            pool_size=4,
            max_overflow=60,
            pool_timeout=busy_timeout_s,
            pool_use_lifo=True,
        )
        event.listen(engine, "connect", _on_connect)
        return engine

    def reading(self, engine: Engine) -> AbstractContextManager[Connection]:
        return _transaction(engine, "BEGIN")

    def appending(self, engine: Engine) -> AbstractContextManager[Connection]:
        return _transaction(engine, "BEGIN IMMEDIATE")

    exclusive = appending


class _FileConnection(sqlite3.Connection):
    path: Path
    file: tuple[int, int] | None  # which one had the name when it was opened

    def check_file(self) -> None:
        """Raises StoreUnavailable."""
        if self.file is None or self.file != _file_at(self.path):
            raise StoreUnavailable(
                f"store {self.path}: the file was removed or replaced while it was open; put it"
                " back, or end the programs that use it"
            )


def _open_file(path: Path, timeout_s: float) -> _FileConnection:
    opened = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",  # never a new one
        uri=True,
        timeout=timeout_s,
        check_same_thread=False,
        factory=_FileConnection,
    )
    # Now: a file of a container's image is another one once it is open for writing.
    opened.path, opened.file = path, _file_at(path)
    return opened


def _refuse_foreign(path: Path) -> None:
    """A file that is no store: its mode, its journal and its tables stay as they are. One that
    cannot be read just now is for whoever opens it. Raises StoreForeign, StoreUnavailable."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as there:
            tables = [name for (name,) in there.execute(_TABLES)]
    except sqlite3.OperationalError:
        return
    except sqlite3.DatabaseError as error:
        reason = f"store {path}: {error}; give the store a file of its own"
        raise StoreUnavailable(reason) from None
    if tables and "rollouts" not in tables:
        some = ", ".join(tables[:3]) + (", ..." if len(tables) > 3 else "")
        raise StoreForeign(
            f"store {path}: the file holds another program's tables ({some}):"
            " give the store a file of its own"
        )


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # `_transaction` says BEGIN, not the driver
    cursor = connection.cursor()
    _use_wal(cursor)
    # FULL: a commit is flushed before it is acknowledged. It survives the end of any process and
    # of the system; a loss of power too, if the disk does not claim flushes that it only caches.
    cursor.execute("PRAGMA synchronous=FULL")
    # Pages go from the log into the file by 16 MB: those that are written again and again go once.
    cursor.execute("PRAGMA wal_autocheckpoint=4000")
    # KiB of pages, a quarter of SQLite's default. What another connection writes makes all of them
    # stale, and the system has the file in memory: more would only let each process of a proxy grow
    # by several MB as the store does.
    cursor.execute("PRAGMA cache_size=-512")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    # Two processes that turn a new file to WAL at once: one gets "locked" without any wait.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def _transaction(engine: Engine, begin: str) -> Iterator[Connection]:
    # SQLAlchemy's own event for it would slow down every statement.
    with engine.begin() as connection:
        try:
            cast(_FileConnection, connection.connection.driver_connection).check_file()
        except StoreUnavailable:
            connection.invalidate()  # what has the name by then is opened next time
            raise
        connection.exec_driver_sql(begin)
        yield connection

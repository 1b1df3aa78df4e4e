"""Empty stores for tests, without the price of building their tables for each."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.store.postgres_server import Server, database_of
from tracegrad.store import Store
from tracegrad.store.models import REVISION, Base

_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
# Quicker than TRUNCATE for the few rows of a test.
_EMPTY = ";".join(
    [
        "SET session_replication_role = replica",  # in any order
        *(f"DELETE FROM {table}" for table in Base.metadata.tables),
        "SELECT setval(oid, 1, false) FROM pg_class WHERE relkind = 'S'",
    ]
)


class SQLiteStores:
    """Copies of one file."""

    def __init__(self, folder: Path) -> None:
        self._made = folder / "made.db"
        Store.open(f"sqlite:///{self._made}").close()

    def put(self, path: Path) -> None:
        shutil.copyfile(self._made, path)


class PostgreSQLStores:
    """One database, emptied after each test; a new one where a test changed its tables."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._free: list[str] = []

    def take(self) -> str:
        if self._free:
            return self._free.pop()
        url = self._server.new_database()
        Store.open(url).close()
        return url

    def give_back(self, url: str) -> None:
        with self._server.connect(database_of(url)) as connection:
            connection.execute(_OTHERS)
            found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
            connection.execute(_EMPTY)
        if found == [(REVISION,)]:
            self._free.append(url)
        else:
            self._server.drop(url)

"""The shop's figures as a SQLite database, and the only way in which an agent may ask it: one
statement that reads, with bounds on its work and its rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from examples.shop.tasks import FORECAST, PRICE, STOCK

# What the model is told. `orders` is a decoy: what is on its way has the columns of what is there.
SCHEMA = "stock(item, city, units) orders(item, city, units) prices(item, city, price)"
TABLES = {"stock": ("units", STOCK), "orders": ("units", FORECAST), "prices": ("price", PRICE)}

MAX_ROWS = 20
# Of SQLite's virtual machine; a right query needs some thousand, a join without an end any number.
MAX_INSTRUCTIONS = 1_000_000
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}

Rows = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class QueryFailed(Exception):
    """The message is SQLite's, for the model to read."""

    message: str


def create(path: Path) -> Path:
    """Writes the database to `path`; one that is there is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    with connection:
        for name, (column, figures) in TABLES.items():
            connection.execute(f"CREATE TABLE {name} (item TEXT, city TEXT, {column} INTEGER)")
            connection.executemany(
                f"INSERT INTO {name} VALUES (?, ?, ?)", [(*pair, n) for pair, n in figures.items()]
            )
    connection.close()
    return path


class Database:
    """Opened for reading: what a model writes is run as it is, and can change nothing."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        # ATTACH would make files anywhere, and a PRAGMA would lift bounds.
        self._connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY
        )
        # Returns true at its first call: the statement is ended then.
        self._connection.set_progress_handler(lambda: 1, MAX_INSTRUCTIONS)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)

    def query(self, sql: str) -> Rows:
        """The first rows of one statement. Raises QueryFailed."""
        try:
            return _tuples(self._connection.execute(sql).fetchmany(MAX_ROWS))
        except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError) as error:
            raise QueryFailed(str(error)) from None

    def close(self) -> None:
        self._connection.close()


def _tuples(rows: Iterable[tuple[object, ...]]) -> Rows:
    return tuple(tuple(row) for row in rows)

"""Where stores are made: a file for SQLite, a server of the benchmark's own for PostgreSQL.

Both flush every commit to the disk, as they come.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
from tests.support.store import postgres_server as postgres

from tracegrad.store import Store


class Place(ABC):
    name: str

    @abstractmethod
    def new_url(self) -> str:
        """Of a store that is not there yet."""

    @abstractmethod
    def size(self, url: str) -> int:
        """Bytes on the disk, after all that was committed has come to its place."""

    @abstractmethod
    def settle(self, url: str) -> None:
        """Have the database know its tables as it does after hours of use."""

    @abstractmethod
    def drop(self, url: str) -> None:
        """Nobody else has it open."""

    @contextmanager
    def store(self) -> Iterator[Store]:
        """A new one, gone at the end."""
        url = self.new_url()
        try:
            with Store.open(url) as opened:
                yield opened
        finally:
            self.drop(url)


class SQLite(Place):
    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()

    def new_url(self) -> str:
        return f"sqlite:///{self._folder / f'{next(self._numbers)}.db'}"

    def size(self, url: str) -> int:
        path = _path(url)
        with sqlite3.connect(path, timeout=30) as connection:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert not busy, "nobody else uses the store now"
        connection.close()
        return path.stat().st_size

    def settle(self, url: str) -> None:
        self.size(url)

    def drop(self, url: str) -> None:
        for suffix in ("", "-wal", "-shm"):
            _path(url + suffix).unlink(missing_ok=True)


class PostgreSQL(Place):
    name = "PostgreSQL"

    def __init__(self, server: postgres.Server) -> None:
        self._server = server

    def new_url(self) -> str:
        return self._server.new_database()

    def size(self, url: str) -> int:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
            assert row is not None
            size: int = row[0]
            return size

    def settle(self, url: str) -> None:
        """The server does it by itself, a minute later."""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")

    def drop(self, url: str) -> None:
        self._server.drop(url)


@contextmanager
def places(folder: Path) -> Iterator[list[Place]]:
    with postgres.running(durable=True) as server:
        yield [SQLite(folder), PostgreSQL(server)]


def postgresql_version() -> str:
    command = [str(postgres.programs() / "postgres"), "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.split()[2]


def flush_ms(folder: Path, times: int = 100) -> float:
    """What the disk takes to keep 4 KiB for good; the median."""
    path, taken = folder / "flush", []
    with path.open("wb", buffering=0) as file:
        for _ in range(times):
            file.write(bytes(4096))
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - start)
    path.unlink()
    return statistics.median(taken) * 1e3


def _path(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))

"""A server that several proxies and trainers share: PostgreSQL, by psycopg.

Appending transactions run side by side. Exclusive ones take one advisory lock, which PostgreSQL
gives back at their end, whatever the end is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL, Connection, Engine, create_engine, func, select

from tracegrad.store.databases.base import Database
from tracegrad.store.packing import dump_json

# Any number that other users of the same database are unlikely to choose: "tracegra".
_EXCLUSIVE = int.from_bytes(b"tracegra", "big")
_CONNECT_S = 10


class PostgreSQL(Database):
    def __init__(self, url: URL) -> None:
        if not url.database:
            raise ValueError("store: it needs a database: postgresql://USER@HOST/NAME")
        super().__init__(url)

    def describe(self) -> str:
        return self.url.set(drivername="postgresql").render_as_string(hide_password=True)

    def prepare(self, *, create: bool) -> None:
        """Databases are made by those who may: `createdb NAME`."""

    def engine(self, *, busy_timeout_s: float) -> Engine:
        wait_ms = max(1, round(busy_timeout_s * 1000))
        return create_engine(
            self.url,
            connect_args={
                "connect_timeout": _CONNECT_S,
                "application_name": "tracegrad",
                # A process that hangs inside a transaction must not hold up all others for good.
                "options": f"-c lock_timeout={wait_ms} "
                f"-c idle_in_transaction_session_timeout={10 * wait_ms}",
            },
            json_serializer=dump_json,
            pool_size=4,
            max_overflow=60,
            pool_timeout=busy_timeout_s,
            # A server that was restarted has closed what the pool holds.
            pool_pre_ping=True,
        )

    @contextmanager
    def appending(self, engine: Engine) -> Iterator[Connection]:
        with engine.begin() as connection:
            yield connection

    @contextmanager
    def exclusive(self, engine: Engine) -> Iterator[Connection]:
        with engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(_EXCLUSIVE)))
            yield connection

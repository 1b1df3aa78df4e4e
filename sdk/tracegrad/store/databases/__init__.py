"""The databases that a store may be in. Nothing else in the store knows which one it is."""

from __future__ import annotations

from sqlalchemy import exc, make_url

from tracegrad.store.databases.base import BUSY_TIMEOUT_S, Database
from tracegrad.store.databases.postgresql import PostgreSQL
from tracegrad.store.databases.sqlite import SQLite
from tracegrad.store.databases.statements import insert_new, upsert

__all__ = ["BUSY_TIMEOUT_S", "Database", "database_at", "insert_new", "upsert"]

_HOW = "write sqlite:///PATH or postgresql://USER@HOST/NAME"


def database_at(url: str) -> Database:
    """ValueError: the URL is no use."""
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ValueError(f"store: {url!r} is no URL; {_HOW}") from None
    backend = parsed.get_backend_name()
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return SQLite(parsed)
    if backend == "postgres" or parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return PostgreSQL(parsed.set(drivername="postgresql+psycopg"))
    raise ValueError(f"store: {parsed.drivername!r} is not a database it can use; {_HOW}")

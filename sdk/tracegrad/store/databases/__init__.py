"""The databases that a store may be in. Nothing else in the store knows which one it is."""

from __future__ import annotations

from sqlalchemy import exc, make_url

from tracegrad.store.databases.base import BUSY_TIMEOUT_S, Conflict, Database
from tracegrad.store.databases.postgresql import PostgreSQL
from tracegrad.store.databases.sqlite import SQLite
from tracegrad.store.databases.statements import insert_new, upsert
from tracegrad.urls import masked

__all__ = ["BUSY_TIMEOUT_S", "Conflict", "Database", "database_at", "insert_new", "upsert"]

_HOW = "write sqlite:///PATH or postgresql://USER@HOST/NAME"
_SQLITE = ("sqlite", "sqlite+pysqlite")
# The short form is what hosting services hand out.
_POSTGRESQL = ("postgresql", "postgresql+psycopg", "postgres", "postgres+psycopg")


def database_at(url: str) -> Database:
    """ValueError: the URL is no use."""
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        raise ValueError(f"store: {masked(url)!r} is no URL; {_HOW}") from None
    if "@" in (parsed.host or ""):
        # The end of a password, which errors of the connection would name as a host.
        raise ValueError(f"store: {masked(url)!r}: write each @ of the password as %40")
    if parsed.drivername in _SQLITE:
        return SQLite(parsed)
    if parsed.drivername in _POSTGRESQL:
        return PostgreSQL(parsed.set(drivername="postgresql+psycopg"))
    raise ValueError(f"store: {parsed.drivername!r} is not a database it can use; {_HOW}")

"""What no program of ours does to a store: for tests of who notices."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import psycopg
from sqlalchemy import make_url, update

from tracegrad.store import Store
from tracegrad.store.models import Turns


def set_columns(store: Store, turn_id: str, **values: Any) -> None:
    """Of a turn's row."""
    with store.appending() as connection:
        connection.execute(update(Turns).where(Turns.turn_id == turn_id).values(**values))


def corrupt(url: str, statement: str, *values: Any) -> None:
    """Runs with the database's own checks of references switched off."""
    if url.startswith("sqlite"):
        path = make_url(url).database
        assert path is not None
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(statement, values)
    else:
        with psycopg.connect(url, autocommit=True) as server:
            server.execute("SET session_replication_role = replica")
            server.execute(statement.replace("?", "%s"), values)

"""A server that several proxies and trainers share: PostgreSQL, by psycopg.

Appending transactions run side by side. Exclusive ones take one advisory lock, which PostgreSQL
gives back at their end, whatever the end is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, func, select
from sqlalchemy.engine import ExceptionContext

from tracegrad.store.databases.base import Conflict, Database
from tracegrad.store.databases.json_columns import json_text, json_value
from tracegrad.store.databases.postgresql_fixes import fix_for
from tracegrad.store.errors import StoreLost, StoreUnavailable

# Any number that other users of the same database are unlikely to choose: "tracegra".
_EXCLUSIVE = int.from_bytes(b"tracegra", "big")

# What libpq gets unless the URL says otherwise. A server that vanished without a word is noticed
# within a minute, not after the system's two hours.
_CONNECTING: Mapping[str, int | str] = {
    "application_name": "tracegrad",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
# Of the URL's query, what distinguishes one store from another.
_NAMING = frozenset({"host", "port", "user", "dbname", "service"})
# A process holds so many of the server's connections at most; its other threads wait.
_KEPT, _MORE = 4, 12

# A server that only reads: after a failover the standby, where a connection was made too early.
_READ_ONLY = "25006"
# SQLSTATEs, by their beginnings, that are the server's state and no mistake of ours: connections,
# read-only and ended transactions, missing rights, resources, locks, operators, disks, its defects.
_SERVERS = (
    *("08", _READ_ONLY, "25P03", "25P04", "28", "3D", "3F", "40", "42501"),
    *("53", "55006", "55P03", "57", "58", "F0", "XX"),
)
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
# Of connections, and of a server that ends, crashed, starts, or only reads.
_LOST = ("08", "57P01", "57P02", "57P03", _READ_ONLY)

_SETTINGS = """
SELECT set_config('lock_timeout', %s, false),
       set_config('idle_in_transaction_session_timeout', %s, false)
"""
_DURABLE = """
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off'
"""


class PostgreSQL(Database):
    def __init__(self, url: URL) -> None:
        if not (url.database or {"dbname", "service"} & url.query.keys()):
            raise ValueError("store: it needs a database: postgresql://USER@HOST/NAME")
        super().__init__(url)
        self._check_options()

    def _check_options(self) -> None:
        try:
            from psycopg import ProgrammingError, conninfo
        except ImportError as error:
            raise ValueError(
                "store: PostgreSQL needs a driver: pip install 'tracegrad[postgres]'"
            ) from error
        try:
            conninfo.make_conninfo(**dict.fromkeys(self.url.query, "1"))
        except ProgrammingError as error:
            raise ValueError(
                f"store: {' '.join(str(error).split())}; leave it out of the URL "
                "(libpq's parameters are known)"
            ) from None

    def describe(self) -> str:
        naming = {key: value for key, value in self.url.query.items() if key in _NAMING}
        return self.url.set(drivername="postgresql", query=naming).render_as_string()

    def prepare(self, *, create: bool) -> None:
        """Databases are made by those who may: `createdb NAME`."""

    def engine(self, *, busy_timeout_s: float) -> Engine:
        defaults = {k: v for k, v in _CONNECTING.items() if k not in self.url.query}
        engine = create_engine(
            self.url,
            connect_args={**defaults, "client_encoding": "utf8"},
            isolation_level="READ COMMITTED",  # whatever the server's default is
            json_serializer=json_text,
            json_deserializer=json_value,
            pool_size=_KEPT,
            max_overflow=_MORE,
            pool_timeout=busy_timeout_s,
            # A server that was restarted has closed what the pool holds.
            pool_pre_ping=True,
        )
        wait_ms = max(1, round(busy_timeout_s * 1000))

        def on_connect(connection: Any, _record: object) -> None:
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise self.unavailable(
                    f"the database's encoding is {encoding}; make one that holds any text: "
                    "createdb -E UTF8 -T template0 NAME"
                )
            # A process that hangs inside a transaction must not hold up all others for good.
            connection.execute(_SETTINGS, (str(wait_ms), str(10 * wait_ms)))
            # What is acknowledged is on the disk, unless this very URL asks for less.
            if "synchronous_commit" not in str(self.url.query.get("options", "")):
                connection.execute(_DURABLE)
            connection.commit()

        def on_error(context: ExceptionContext) -> None:
            # Its connections live on and answer pings; new ones may lead to the primary.
            if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
                context.is_disconnect = True

        event.listen(engine, "connect", on_connect)
        event.listen(engine, "handle_error", on_error)
        return engine

    @contextmanager
    def reading(self, engine: Engine) -> Iterator[Connection]:
        with engine.connect() as connection:
            # Else each statement would see what others committed since the one before.
            connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    def appending(self, engine: Engine) -> AbstractContextManager[Connection]:
        return engine.begin()

    @contextmanager
    def exclusive(self, engine: Engine) -> Iterator[Connection]:
        with engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(_EXCLUSIVE)))
            yield connection

    def translate_error(self, error: exc.DBAPIError) -> StoreUnavailable | None:
        state = getattr(error.orig, "sqlstate", None)
        if state is None:  # no answer of a server: the connection itself
            if not isinstance(error, exc.OperationalError | exc.InterfaceError):
                return super().translate_error(error)
        elif not state.startswith(_SERVERS):
            return None
        reason = getattr(error.orig, "diag", None)
        message = (reason and reason.message_primary) or str(error.orig)
        line = self.line(message + fix_for(message, self.url))
        if state in _CONFLICTS:
            return Conflict(line)
        lost = state is None or state.startswith(_LOST)
        return StoreLost(line) if lost else StoreUnavailable(line)

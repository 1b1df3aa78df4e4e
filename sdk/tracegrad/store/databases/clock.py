"""The clock that leases end by: the database's, one for all that share it.

Trainers on several machines share a PostgreSQL server, whose clock it is. SQLite is for one
machine, and its clock is that machine's.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, select

_POSTGRESQL = select(func.extract("epoch", func.clock_timestamp()))


def server_time(connection: Connection) -> float:
    """Seconds since the epoch, at this moment and not at the transaction's beginning."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(_POSTGRESQL).scalar_one())
    return time.time()

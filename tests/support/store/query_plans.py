"""How a database would go about a question."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, text

from tracegrad.store import Store


def uses_index(store: Store, query: Select[Any]) -> bool:
    """Whether it would look up what is asked in an index if the tables were large."""
    plan = " ".join(explained(store, query))
    looked_up = "Index Cond:" in plan or "SEARCH" in plan
    return looked_up and "Seq Scan" not in plan and "SCAN" not in plan


def explained(store: Store, query: Select[Any]) -> list[str]:
    with store.reading() as connection:
        if connection.dialect.name == "postgresql":
            # In an empty table it would not bother to open an index.
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            return _said(connection, "EXPLAIN", query)
        return _said(connection, "EXPLAIN QUERY PLAN", query)


def _said(connection: Connection, how: str, query: Select[Any]) -> list[str]:
    compiled = query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
    return [str(row[-1]) for row in connection.exec_driver_sql(f"{how} {compiled}")]

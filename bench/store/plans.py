"""What the database says it does for the statements of an operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, event

from tracegrad.store import Store

_EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN ", "postgresql": "EXPLAIN (COSTS OFF) "}
_MOST_WORDS, _MOST_LINE = 300, 160


@dataclass(frozen=True, slots=True)
class Plan:
    operation: str
    statement: str  # shortened
    lines: tuple[str, ...]


def plans(store: Store, operations: Mapping[str, Callable[[], object]]) -> list[Plan]:
    """Of each statement once, where it was made first."""
    found: dict[str, Plan] = {}
    for name, work in operations.items():
        with _noted() as noted:
            work()
        with store.reading() as connection:
            for statement, parameters in noted:
                words = _plain(statement)
                if words not in found and _has_plan(statement):
                    lines = tuple(_explained(connection, statement, parameters))
                    found[words] = Plan(name, shortened(statement), lines)
    return list(found.values())


def shortened(statement: str) -> str:
    """Without the list of columns."""
    words = _plain(statement)
    if words.startswith("SELECT ") and (start := _from(words)):
        words = "SELECT …" + words[start:]
    return _cut(words, _MOST_WORDS)


def _plain(statement: str) -> str:
    """On one line, with one parameter for many."""
    words = re.sub(r'%\(\w+\)s(::\w+)?( COLLATE "C")?', "?", " ".join(statement.split()))
    return re.sub(r"\?(, \?)+", "?, …", words)


def _from(words: str) -> int:
    """Where the FROM of the outermost SELECT is; 0 if there is none."""
    depth = 0
    for at, letter in enumerate(words):
        depth += (letter == "(") - (letter == ")")
        if not depth and words.startswith(" FROM ", at):
            return at
    return 0


def _has_plan(statement: str) -> bool:
    kind = statement.split(maxsplit=1)[0]
    return kind in ("UPDATE", "DELETE") or " FROM " in _plain(statement)


@contextmanager
def _noted() -> Iterator[list[tuple[str, Any]]]:
    """Of all engines: a store may have several."""
    noted: list[tuple[str, Any]] = []

    def note(
        _connection: Connection,
        _cursor: object,
        statement: str,
        parameters: Any,
        _context: object,
        many: bool,
    ) -> None:
        noted.append((statement, parameters[0] if many else parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def _explained(connection: Connection, statement: str, parameters: Any) -> Iterator[str]:
    backend = connection.dialect.name
    rows = connection.exec_driver_sql(_EXPLAIN[backend] + statement, parameters).all()
    if backend == "postgresql":
        yield from (_cut(row[0]) for row in rows)
        return
    depth = {0: 0}
    for at, parent, _, words in rows:
        depth[at] = depth.get(parent, 0) + 1
        yield "  " * (depth[at] - 1) + words


def _cut(words: str, most: int = _MOST_LINE) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"

"""Stored conversations whose requests share texts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from support.store.events import chain
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.models import Turns

LONG = "a system prompt that every turn repeats, and which is stored once only. " * 8


def request(*texts: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": LONG}]
    return {"model": "m", "messages": [*messages, *({"role": "user", "content": t} for t in texts)]}


def response(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def conversation(rollout_id: str = "r", turns: int = 4, at: float = 1000.0) -> list[Turn]:
    """A turn every 1000 seconds; each request repeats the one before."""
    texts = [
        f"message {n} of many, each long enough to be stored as a delta" * 3 for n in range(turns)
    ]
    return chain(
        rollout_id,
        turns,
        request=lambda number: request(*texts[: number + 1]),
        response=lambda number: response(f"reply {number}"),
        created_at=lambda number: at + 1000.0 * number,
    )


def column(store: Store, name: str) -> dict[str, Any]:
    """Of the turns' rows, by turn in order of capture."""
    query = select(Turns.turn_id, getattr(Turns, name)).order_by(Turns.seq)
    with store.reading() as connection:
        return dict(connection.execute(query).tuples().all())


def bases(store: Store) -> dict[str, str | None]:
    return column(store, "request_base")

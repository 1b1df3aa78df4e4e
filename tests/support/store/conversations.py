"""Stored conversations whose requests share texts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from support.store.events import make_turn
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.models import Turns

LONG = "a system prompt that every turn repeats, and which is stored once only. " * 8


def request(*said: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": LONG}]
    return {"model": "m", "messages": [*messages, *({"role": "user", "content": s} for s in said)]}


def response(said: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": said}}]}


def conversation(rollout_id: str = "r", turns: int = 4, at: float = 1000.0) -> list[Turn]:
    """A turn every 1000 seconds; each request repeats the one before."""
    made: list[Turn] = []
    for number in range(turns):
        said = [f"message {n} of many, none of them short enough to be told twice" * 3 for n in
                range(number + 1)]  # fmt: skip
        made.append(
            make_turn(
                f"{rollout_id}.{number}",
                rollout_id,
                parent=made[-1] if made else None,
                request=request(*said),
                response=response(f"reply {number}"),
                created_at=at + 1000.0 * number,
            )
        )
    return made


def bases(store: Store) -> dict[str, str | None]:
    query = select(Turns.turn_id, Turns.request_base).order_by(Turns.seq)
    with store.reading() as connection:
        return dict(connection.execute(query).tuples().all())

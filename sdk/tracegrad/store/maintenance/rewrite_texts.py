"""The texts of a rollout's turns, changed, and told anew where they refer to each other.

A request is stored as what it adds to an earlier one of its rollout (`sharing`). So when one is
changed or dropped, those that are told by it must be told again; the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, update

from tracegrad.events import Json
from tracegrad.store.encoding.blobs import json_pieces, pack
from tracegrad.store.encoding.request_delta import Earlier, share
from tracegrad.store.encoding.request_fingerprint import Marks
from tracegrad.store.encoding.request_restore import Rebuilt, rebuild
from tracegrad.store.encoding.shared_texts import (
    Lifting,
    Placed,
    Repeats,
    add_links,
    add_texts,
    placed_texts,
    remove_links,
    remove_unused,
    unpack_raw,
)
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.models import Turns, TurnTexts
from tracegrad.store.write.parent_cache import LATEST

Values = dict[str, Any]

_COLUMNS = (
    Turns.turn_id,
    Turns.parent_id,
    Turns.created_at,
    Turns.sampling,
    Turns.request,
    Turns.response,
    Turns.request_base,
    Turns.request_marks,
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Of one turn. Requests of one conversation hold the same items: replace, never change."""

    turn_id: str
    parent_id: str | None
    created_at: float
    request: Json | None
    response: Json | None
    sampling: Json


Change = Callable[[Texts], Texts]


@dataclass(frozen=True, slots=True)
class Told:
    """A turn whose row is to be another one. `changed`: its own texts are."""

    turn_id: str
    parent_id: str | None
    changed: bool
    row: Values
    lifting: Lifting | None = None  # where its texts are told anew


@dataclass(slots=True)
class _Earlier:
    """What the turns read so far mean to later ones."""

    requests: dict[str, Rebuilt] = field(default_factory=dict)  # as they are stored
    marks: dict[str, Earlier] = field(default_factory=dict)  # as they will be
    changed: set[str] = field(default_factory=set)  # whose texts will be others

    def candidates(self, texts: Texts) -> list[Earlier]:
        latest = [*self.marks.values()][: -LATEST - 1 : -1]
        parent = self.marks.get(texts.parent_id or "")
        return [parent, *latest] if parent else latest


def read_texts(connection: Connection, rollout_id: str) -> Iterator[Texts]:
    """In order of capture. Raises StoreCorrupt that names the turn."""
    earlier = _Earlier()
    rows = _rows(connection, rollout_id)
    placed = placed_texts(connection, [row.turn_id for row in rows])
    for row in rows:
        yield _texts(row, earlier, placed)


def tell_anew(
    connection: Connection, rollout_id: str, change: Change, repeats: Repeats
) -> Iterator[Told]:
    """The turns whose rows `change` makes other ones. Raises StoreCorrupt that names the turn."""
    earlier = _Earlier()
    rows = _rows(connection, rollout_id)
    placed = placed_texts(connection, [row.turn_id for row in rows])
    for row in rows:
        old = _texts(row, earlier, placed)
        new = change(old)
        same = new.request == old.request and new.response == old.response
        changed = not same or new.sampling != old.sampling
        if same and row.request_base not in earlier.changed:
            if row.request_marks is not None:
                earlier.marks[row.turn_id] = Earlier(row.turn_id, Marks.decode(row.request_marks))
            if changed:
                yield Told(row.turn_id, row.parent_id, True, {"sampling": new.sampling})
            continue
        if not same:
            earlier.changed.add(row.turn_id)
        lifting = Lifting(rollout_id, repeats)
        yield Told(row.turn_id, row.parent_id, changed, _told(new, earlier, lifting), lifting)


def rewrite(connection: Connection, turns: Sequence[Told]) -> None:
    unused: set[bytes] = set()
    for turn in turns:
        statement = update(Turns).where(Turns.turn_id == bindparam("which"))
        connection.execute(statement.values(**turn.row), {"which": turn.turn_id})
        if turn.lifting is not None:
            unused |= remove_links(connection, TurnTexts.turn_id == turn.turn_id)
            packed = pack([*turn.lifting.texts.values()])
            add_texts(connection, dict(zip(turn.lifting.texts, packed, strict=True)))
            add_links(connection, turn.lifting.links(turn.turn_id))
    remove_unused(connection, unused)


def _rows(connection: Connection, rollout_id: str) -> Sequence[Row[Any]]:
    query = select(*_COLUMNS).where(Turns.rollout_id == rollout_id).order_by(Turns.seq)
    return connection.execute(query).all()


def _texts(row: Row[Any], earlier: _Earlier, placed: Placed) -> Texts:
    try:
        request, response = unpack_raw(row, placed)
        if row.request_marks is not None:
            base = earlier.requests.get(row.request_base or "")
            if base is None and row.request_base is not None:
                raise StoreCorrupt(f"turn {row.request_base}, which it continues, is not stored")
            rebuilt = rebuild(request, response, row.request_marks, base)
            earlier.requests[row.turn_id] = rebuilt
            request = rebuilt.request
    except StoreCorrupt as error:
        raise StoreCorrupt(f"turn {row.turn_id}: {error}") from error
    return Texts(row.turn_id, row.parent_id, row.created_at, request, response, dict(row.sampling))


def _told(texts: Texts, earlier: _Earlier, lifting: Lifting) -> Values:
    shared, request = None, None
    if texts.request is not None:
        shared = share(texts.request, texts.response, earlier.candidates(texts))
        earlier.marks[texts.turn_id] = Earlier(texts.turn_id, Marks.decode(shared.marks))
        request = lifting.request(shared.text, whole=shared.base is None)
    return {
        "sampling": texts.sampling,
        "request": _packed(request),
        "response": _packed(lifting.response(texts.response)),
        "request_base": shared.base if shared else None,
        "request_marks": shared.marks if shared else None,
    }


def _packed(value: Any) -> bytes | None:
    if value is None:
        return None
    [blob] = pack([json_pieces(value)])
    return blob

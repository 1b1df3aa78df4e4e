"""The texts of a rollout's turns and spans, changed; requests are encoded again where they refer
to each other.

A request is stored as what it adds to an earlier one of its rollout (`request_delta`). So when one
is changed or dropped, the deltas to it must be made again; the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, update

from tracegrad.events import Event, Json, Span
from tracegrad.store.encoding.blobs import json_content, pack_blobs
from tracegrad.store.encoding.request_delta import BaseCandidate, make_delta
from tracegrad.store.encoding.request_fingerprint import RequestFingerprint
from tracegrad.store.encoding.request_restore import RestoredRequest, restore_content
from tracegrad.store.encoding.shared_texts import (
    SharedTextsByTurn,
    TextExtraction,
    TextSightings,
    add_links,
    add_texts,
    load_shared_texts,
    remove_links,
    remove_unused,
)
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.models import Spans, Turns, TurnTexts
from tracegrad.store.write.parent_cache import RECENT_TURNS

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
class EditableTexts:
    """Of one turn. Requests of one conversation hold the same items: replace, never change."""

    turn_id: str
    parent_id: str | None
    created_at: float
    request: Json | None
    response: Json | None
    sampling: Json


TextEdit = Callable[[EditableTexts], EditableTexts]


@dataclass(frozen=True, slots=True)
class RewrittenTurn:
    """A turn whose row is to be another one. `changed`: its own texts are."""

    turn_id: str
    parent_id: str | None
    changed: bool
    row: Values
    extraction: TextExtraction | None = None  # where its texts are encoded again


@dataclass(slots=True)
class _Earlier:
    """What the turns read so far mean to later ones."""

    requests: dict[str, RestoredRequest] = field(default_factory=dict)  # as they are stored
    marks: dict[str, BaseCandidate] = field(default_factory=dict)  # as they will be
    changed: set[str] = field(default_factory=set)  # whose texts will be others

    def candidates(self, texts: EditableTexts) -> list[BaseCandidate]:
        latest = [*self.marks.values()][: -RECENT_TURNS - 1 : -1]
        parent = self.marks.get(texts.parent_id or "")
        return [parent, *latest] if parent else latest


def rewritten_turns(
    connection: Connection, rollout_id: str, change: TextEdit, repeats: TextSightings
) -> Iterator[RewrittenTurn]:
    """The turns whose rows `change` makes other ones. Raises StoreCorrupt that names the turn."""
    earlier = _Earlier()
    query = select(*_COLUMNS).where(Turns.rollout_id == rollout_id).order_by(Turns.seq)
    rows = connection.execute(query).all()
    placed = load_shared_texts(connection, [row.turn_id for row in rows])
    for row in rows:
        old = _texts(row, earlier, placed)
        new = change(old)
        same = new.request == old.request and new.response == old.response
        changed = not same or new.sampling != old.sampling
        if same and row.request_base not in earlier.changed:
            if row.request_marks is not None:
                earlier.marks[row.turn_id] = BaseCandidate(
                    row.turn_id, RequestFingerprint.decode(row.request_marks)
                )
            if changed:
                yield RewrittenTurn(row.turn_id, row.parent_id, True, {"sampling": new.sampling})
            continue
        if not same:
            earlier.changed.add(row.turn_id)
        lifting = TextExtraction(rollout_id, repeats)
        yield RewrittenTurn(
            row.turn_id, row.parent_id, changed, _rewritten_columns(new, earlier, lifting), lifting
        )


def write_rewritten(connection: Connection, turns: Sequence[RewrittenTurn]) -> None:
    unused: set[bytes] = set()
    for turn in turns:
        statement = update(Turns).where(Turns.turn_id == bindparam("which"))
        connection.execute(statement.values(**turn.row), {"which": turn.turn_id})
        if turn.extraction is not None:
            unused |= remove_links(connection, TurnTexts.turn_id == turn.turn_id)
            packed = pack_blobs([*turn.extraction.texts.values()])
            add_texts(connection, dict(zip(turn.extraction.texts, packed, strict=True)))
            add_links(connection, turn.extraction.links(turn.turn_id))
    remove_unused(connection, unused)


def rewritten_spans(spans: Iterable[Span], change: Callable[[Event], Event]) -> list[Values]:
    """Of the spans whose name or attributes `change` makes other ones, for `write_spans`."""
    rows = []
    for span in spans:
        new = change(span)
        assert isinstance(new, Span)
        if (new.name, new.attributes) != (span.name, span.attributes):
            its = {"which": span.trace_id, "what": span.span_id}
            rows.append({**its, "name": new.name, "attributes": new.attributes})
    return rows


def write_spans(connection: Connection, rows: Sequence[Values]) -> None:
    if rows:
        its = (Spans.trace_id == bindparam("which"), Spans.span_id == bindparam("what"))
        connection.execute(update(Spans).where(*its), rows)


def _texts(row: Row[Any], earlier: _Earlier, placed: SharedTextsByTurn) -> EditableTexts:
    try:
        request, response = restore_content(row, placed, earlier.requests)
    except StoreCorrupt as error:
        raise StoreCorrupt(f"turn {row.turn_id}: {error}") from error
    return EditableTexts(
        row.turn_id, row.parent_id, row.created_at, request, response, dict(row.sampling)
    )


def _rewritten_columns(texts: EditableTexts, earlier: _Earlier, lifting: TextExtraction) -> Values:
    shared, request = None, None
    if texts.request is not None:
        shared = make_delta(texts.request, texts.response, earlier.candidates(texts))
        earlier.marks[texts.turn_id] = BaseCandidate(
            texts.turn_id, RequestFingerprint.decode(shared.fingerprint)
        )
        request = lifting.request(shared.text, whole=shared.base is None)
    return {
        "sampling": texts.sampling,
        "request": _packed(request),
        "response": _packed(lifting.response(texts.response)),
        "request_base": shared.base if shared else None,
        "request_marks": shared.fingerprint if shared else None,
    }


def _packed(value: Any) -> bytes | None:
    if value is None:
        return None
    [blob] = pack_blobs([json_content(value)])
    return blob

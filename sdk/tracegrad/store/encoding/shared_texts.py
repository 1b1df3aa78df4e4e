"""Long texts that come in several rollouts, stored once for all of them.

What one rollout repeats is a delta to its own earlier requests (`request_delta`). Rollouts of one
agent repeat each other's system prompt, tools and files. A value of a request or a reply that was
seen with another rollout before is taken out: null takes its place, a row of `texts` has its JSON
under a digest of that, and rows of `turn_texts` name the turn that uses it, and where. What is seen
for the first time stays in its turn, so texts that never come again cost nothing.

Looked at are, from the outside in: the parts of a request, the items of these, and the long
strings of these; of a reply its long strings.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    bindparam,
    delete,
    exists,
    insert,
    select,
)

from tracegrad.digests import blake2b
from tracegrad.store.databases import insert_new
from tracegrad.store.encoding.blobs import BlobContent, json_content, unpack_json
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.models import SharedTexts, TurnTexts
from tracegrad.store.rows import chunks

MIN_CHARACTERS = 1024  # bytes of JSON below which a value is not worth a row
# Texts, lists and dicts looked at in one reply or item: replies may hold many log-probabilities.
_VALUES = 2_000
_HOLDS_TEXT = (str, list, dict)
_MAX_DIGESTS = 50_000  # digests in memory, about 150 bytes each

Path = tuple[str | int, ...]  # begins with "request" or "response"


def text_digest(json_text: bytes) -> bytes:
    """BLAKE2b, 128 bits."""
    return blake2b(json_text, 16)


class TextSightings:
    """What was seen with which rollout: in memory, of the latest. Safe to use from many threads."""

    def __init__(self, most: int = _MAX_DIGESTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, str] = OrderedDict()
        self._stored: set[bytes] = set()

    def seen_elsewhere(self, digest: bytes, rollout_id: str) -> bool:
        """It was seen with another rollout before."""
        with self._lock:
            first = self._seen.setdefault(digest, rollout_id)
            self._seen.move_to_end(digest)
            if len(self._seen) > self._most:
                self._stored.discard(self._seen.popitem(last=False)[0])
            return first != rollout_id or digest in self._stored

    def missing(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those that may not be stored yet."""
        with self._lock:
            return {digest for digest in digests if digest not in self._stored}

    def remember(self, digests: Iterable[bytes]) -> None:
        """They are stored."""
        with self._lock:
            self._stored.update(digest for digest in digests if digest in self._seen)

    def forget(self) -> None:
        """What was stored may have been removed."""
        with self._lock:
            self._stored.clear()


def _is_plain(key: Any) -> bool:
    """It can be part of a path in every database."""
    return isinstance(key, str) and key.isprintable()


class TextExtraction:
    """What one turn shares with other rollouts, taken out of its request and its reply.

    Values given are not changed; those returned share what stays, with None where a text was.
    """

    def __init__(self, rollout_id: str, repeats: TextSightings) -> None:
        self._rollout_id = rollout_id
        self._repeats = repeats
        self._left = _VALUES
        self.places: list[tuple[Path, bytes]] = []
        self.texts: dict[bytes, BlobContent] = {}

    def links(self, turn_id: str) -> list[dict[str, Any]]:
        """Rows of `TurnTexts`."""
        return [
            {"turn_id": turn_id, "position": position, "path": list(path), "digest": digest}
            for position, (path, digest) in enumerate(self.places)
        ]

    def request(self, delta: Any, *, whole: bool) -> Any:
        """`delta` as `request_delta` makes it; `whole`: to no other request."""
        if whole:
            return {
                key: self._part(value, ("request", key)) if _is_plain(key) else value
                for key, value in delta.items()
            }
        skeleton, news, repeated = delta
        news = {
            key: (n, self._part(items, ("request", 1, key, 1)) if _is_plain(key) else items)
            for key, (n, items) in news.items()
        }
        return [skeleton, news, repeated]

    def response(self, response: Any) -> Any:
        return self._bounded(response, ("response",))

    def _part(self, value: Any, path: Path) -> Any:
        return self._whole_or(value, path, self._items)

    def _items(self, value: Any, path: Path) -> Any:
        if not isinstance(value, list):
            return self._bounded(value, path)
        return [
            self._whole_or(item, (*path, index), self._bounded) for index, item in enumerate(value)
        ]

    def _bounded(self, value: Any, path: Path) -> Any:
        self._left = _VALUES
        return self._strings(value, path)

    def _whole_or(self, value: Any, path: Path, inside: Callable[[Any, Path], Any]) -> Any:
        if not isinstance(value, list | dict):
            return self._strings(value, path)
        text = json_content(value)
        if len(text.pieces[0]) < MIN_CHARACTERS:
            return value
        return None if self._repeated(text, path) else inside(value, path)

    def _strings(self, value: Any, path: Path) -> Any:
        self._left -= 1
        if isinstance(value, str):
            long = len(value) >= MIN_CHARACTERS
            return None if long and self._repeated(json_content(value), path) else value
        if self._left < 0:
            return value
        if isinstance(value, list):
            return [
                self._strings(item, (*path, index)) if isinstance(item, _HOLDS_TEXT) else item
                for index, item in enumerate(value)
            ]
        if isinstance(value, dict):
            return {
                key: self._strings(item, (*path, key))
                if isinstance(item, _HOLDS_TEXT) and _is_plain(key)
                else item
                for key, item in value.items()
            }
        return value

    def _repeated(self, text: BlobContent, path: Path) -> bool:
        digest = text_digest(text.pieces[0])
        if not self._repeats.seen_elsewhere(digest, self._rollout_id):
            return False
        self.places.append((path, digest))
        self.texts[digest] = text
        return True


# Reading

# By turn: where which text belongs.
SharedTextsByTurn = Mapping[str, Sequence[tuple[list[str | int], bytes | None]]]

_OF_TURNS = (
    select(TurnTexts.turn_id, TurnTexts.path, SharedTexts.blob)
    .outerjoin(SharedTexts, SharedTexts.digest == TurnTexts.digest)
    .where(TurnTexts.turn_id.in_(bindparam("ids", expanding=True)))
    .order_by(TurnTexts.turn_id, TurnTexts.position)
)


def load_shared_texts(connection: Connection, turn_ids: Sequence[str]) -> SharedTextsByTurn:
    found: dict[str, list[tuple[list[str | int], bytes | None]]] = {}
    for ids in chunks(turn_ids):
        for turn_id, path, blob in connection.execute(_OF_TURNS, {"ids": ids}):
            found.setdefault(turn_id, []).append((path, blob))
    return found


class TurnContent(NamedTuple):
    """What a turn's row has of its request and reply, with every text in its place."""

    request: Any
    response: Any


def unpack_turn_content(row: Row[Any], placed: SharedTextsByTurn) -> TurnContent:
    """Raises StoreCorrupt."""
    texts = {"request": unpack_json(row.request), "response": unpack_json(row.response)}
    for path, blob in placed.get(row.turn_id, ()):
        if blob is None:
            raise StoreCorrupt("a text that it shares with other rollouts is not stored")
        *way, last = path
        place: Any = texts
        try:
            for step in way:
                place = place[step]
            # Read again for each turn: what is put inside of it next is not the same everywhere.
            place[last] = unpack_json(blob)
        except (LookupError, TypeError) as error:
            raise StoreCorrupt(f"a text that it shares has no place in it ({error!r})") from error
    return TurnContent(**texts)


# Writing and removing, inside the caller's transaction

_ADD_LINKS = insert(TurnTexts)  # built once: making a statement costs more than running it


def add_texts(connection: Connection, texts: Mapping[bytes, bytes]) -> None:
    """Blobs by digest. In order: writers of the same ones do not wait for each other in a ring."""
    rows = [{"digest": digest, "blob": texts[digest]} for digest in sorted(texts)]
    if rows:
        connection.execute(insert_new(connection, SharedTexts), rows)


def add_links(connection: Connection, links: Sequence[Mapping[str, Any]]) -> None:
    if links:
        connection.execute(_ADD_LINKS, links)


def remove_links(connection: Connection, of_turns: ColumnElement[bool]) -> set[bytes]:
    """The texts that they led to: for `remove_unused`, once the new links are there."""
    gone = connection.execute(delete(TurnTexts).where(of_turns).returning(TurnTexts.digest))
    return set(gone.scalars())


def remove_unused(connection: Connection, digests: Iterable[bytes]) -> int:
    """Those of the texts that no turn wants any more. Returns how many."""
    gone = 0
    for some in chunks(sorted(digests)):
        here = SharedTexts.digest.in_(some)
        # Who links one of them at this moment commits first; then the next statement sees it.
        connection.execute(
            select(SharedTexts.digest).where(here).order_by(SharedTexts.digest).with_for_update()
        )
        gone += connection.execute(delete(SharedTexts).where(here, is_unused())).rowcount
    return gone


def is_unused() -> ColumnElement[bool]:
    """Of `SharedTexts`: no turn uses it."""
    return ~exists().where(TurnTexts.digest == SharedTexts.digest)

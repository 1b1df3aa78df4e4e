"""Requests as they were, from what `request_delta` made of them, each proven against its own
fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Row

from tracegrad.events import Json
from tracegrad.store.encoding.request_fingerprint import (
    VALUE,
    PrefixStates,
    RequestFingerprint,
    RequestPart,
    encode_any,
    long_strings,
    part_kinds,
    prefix_lengths,
    prefix_states,
    skeleton_digest,
)
from tracegrad.store.encoding.shared_texts import (
    SharedTextsByTurn,
    TurnContent,
    unpack_turn_content,
)
from tracegrad.store.errors import StoreCorrupt

T = TypeVar("T")

# States of a part from which a later one's proof may begin: of its own end, of earlier parts.
_NEAR, _EARLIER = 4, 16


@dataclass(slots=True)
class RestoredRequest:
    """A request as it was, and what the requests that are stored as deltas to it need.

    They hold the very items of this one: read them, do not change them.
    """

    request: Json
    response: Any
    fingerprint: RequestFingerprint
    parts: Mapping[str, RequestPart]
    prefix_states: Mapping[str, PrefixStates]
    _strings: Mapping[bytes, str] | None = None

    def string(self, digest: bytes) -> str:
        if self._strings is None:
            self._strings = long_strings(self.parts, self.response, most=None)
        return self._strings[digest]


def restore_content(
    row: Row[Any], placed: SharedTextsByTurn, earlier: dict[str, RestoredRequest]
) -> TurnContent:
    """Of a turn's row; `earlier` has the requests of its rollout before it, and gets this one.

    Raises StoreCorrupt.
    """
    request, response = unpack_turn_content(row, placed)
    if row.request_marks is None:
        return TurnContent(request, response)
    base = require_earlier(earlier, row.request_base) if row.request_base is not None else None
    restored = restore_request(request, response, row.request_marks, base)
    earlier[row.turn_id] = restored
    return TurnContent(restored.request, response)


def require_earlier(earlier: Mapping[str, T], turn_id: str) -> T:
    if turn_id not in earlier:
        raise StoreCorrupt(f"turn {turn_id}, which it continues, is not stored")
    return earlier[turn_id]


def restore_request(
    text: Any, response: Any, marks: bytes, base: RestoredRequest | None
) -> RestoredRequest:
    """The inverse of `make_delta`; all of a conversation takes time linear in its length.

    Raises StoreCorrupt where the result is not what was shared.
    """
    known = RequestFingerprint.decode(marks)
    try:
        if base is None:
            request, kept = text, dict.fromkeys(known.parts, 0)
        else:
            request, kept = _apply_delta(text, known, base)
        parts = {
            key: RequestPart(theirs.kind, [request[key]] if theirs.kind == VALUE else request[key])
            for key, theirs in known.parts.items()
        }
        trails = {
            key: _proof(part, base.prefix_states[key] if base and kept[key] else {}, kept[key])
            for key, part in parts.items()
        }
        proven = _proves(request, parts, trails, known)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StoreCorrupt(f"its request cannot be rebuilt ({error!r})") from error
    if not proven:
        raise StoreCorrupt("its request is not the one that was stored")
    return RestoredRequest(request, response, known, parts, trails)


def _apply_delta(
    text: Any, marks: RequestFingerprint, base: RestoredRequest
) -> tuple[Json, dict[str, int]]:
    """The request, and how many items of each part are the base's."""
    skeleton, news, repeated = text
    for (key, *way, last), digest in repeated:
        place = news[key][1]
        for step in way:
            place = place[step]
        place[last] = base.string(bytes.fromhex(digest))
    request = dict(base.request if skeleton is None else skeleton)
    kept = {}
    for key in marks.parts:
        if key in news:
            n, rest = news[key]
            items = base.parts[key].items[:n] + rest if n else rest
        else:
            items = base.parts[key].items
            n = len(items)
        kept[key] = n
        request[key] = items[0] if marks.parts[key].kind == VALUE else items
    return request, kept


def _proof(part: RequestPart, earlier: PrefixStates, kept: int) -> PrefixStates:
    """From the last states of the earlier part on, so that nothing is hashed again."""
    shared = sorted((n for n in earlier if n <= kept), reverse=True)
    known = {n: earlier[n] for n in islice(shared, _EARLIER)}
    return prefix_states(
        part, prefix_lengths(part.kind, len(part.items))[:_NEAR], known, encode_any
    )


def _proves(
    request: Json,
    parts: Mapping[str, RequestPart],
    trails: Mapping[str, PrefixStates],
    marks: RequestFingerprint,
) -> bool:
    skeleton = {key: None if key in parts else value for key, value in request.items()}
    return skeleton_digest(skeleton, part_kinds(parts), encode_any) == marks.skeleton and all(
        len(parts[key].items) == theirs.length
        and trails[key][theirs.length].digest == theirs.digests[theirs.length]
        for key, theirs in marks.parts.items()
    )

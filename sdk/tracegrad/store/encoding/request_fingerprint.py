"""What a turn leaves behind of its request, so that a later one finds what it repeats.

A request is a *skeleton* (its small values, and the order of all its keys) and *parts*, its
large values. A part is a sequence: a list's items, a text's characters, or one item for
anything else. Its marks are digests of its first `n` items for a few `n`: all of them, then one
fewer, two, four, ... Equal digests at `n` mean equal first `n` items. So marks stay small
however long a conversation is, and where one leaves an earlier one at some distance from that
one's end, at most as much again is stored once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import orjson

from tracegrad.digests import blake2b
from tracegrad.jsonutil import encode_json
from tracegrad.store.errors import StoreCorrupt

LIST, TEXT, VALUE = "list", "text", "one"

_SIZE = 8  # bytes a digest
_SMALL = 128  # a value of fewer characters, about, is no part
_LONG = 200  # characters of a string that is worth a digest of its own
_LAST_ITEMS = 4  # of a list, whose long strings are marked
_STRINGS = 2_000  # values looked at for long strings: replies may hold many log-probabilities
_STEP = {LIST: 1, TEXT: 64, VALUE: 1}  # the unit of distances

# Items as a JSON array; each item alike, whatever its neighbours are.
Encode = Callable[[list[Any]], bytes]


def encode_plain(items: list[Any]) -> bytes:
    """TypeError: they are not plain JSON."""
    return orjson.dumps(items)


def encode_any(items: list[Any]) -> bytes:
    """Also integers beyond 64 bits and lone surrogates."""
    try:
        return encode_plain(items)
    except TypeError:
        return b"[%b]" % b",".join(encode_json(item) for item in items)


class RequestPart(NamedTuple):
    kind: str
    items: Any  # a list, or for TEXT a string


@dataclass(frozen=True, slots=True)
class PartFingerprint:
    kind: str
    length: int
    digests: Mapping[int, bytes]  # by position, the last first


@dataclass(frozen=True, slots=True)
class RequestFingerprint:
    skeleton: bytes  # its digest
    parts: Mapping[str, PartFingerprint]
    strings: frozenset[bytes]  # digests of long strings near its end and in its reply

    def encode(self) -> bytes:
        header = [[key, part.kind, part.length] for key, part in self.parts.items()]
        digests = (digest for part in self.parts.values() for digest in part.digests.values())
        return b"".join(
            (orjson.dumps(header), b"\n", self.skeleton, *digests, *sorted(self.strings))
        )

    @classmethod
    def decode(cls, blob: bytes) -> RequestFingerprint:
        header, found, rest = blob.partition(b"\n")
        if not found or len(rest) % _SIZE or not rest:
            raise StoreCorrupt("the marks of a request cannot be read")
        digests = iter([rest[i : i + _SIZE] for i in range(0, len(rest), _SIZE)])
        skeleton = next(digests)
        parts = {
            key: PartFingerprint(
                kind, length, dict(zip(prefix_lengths(kind, length), digests, strict=False))
            )
            for key, kind, length in orjson.loads(header)
        }
        return cls(skeleton, parts, frozenset(digests))


@dataclass(slots=True)
class PrefixState:
    """After some items: the hash of them all, and how many bytes they were."""

    hash: Any
    size: int
    _digest: bytes | None = None

    @property
    def digest(self) -> bytes:
        if self._digest is None:
            self._digest = self.hash.digest()
        return self._digest


PrefixStates = Mapping[int, PrefixState]  # by position


def split_request(request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, RequestPart]]:
    """The skeleton, with None in the place of each part, and the parts."""
    parts = {
        key: _part(value)
        for key, value in request.items()
        if not _is_small(value) and _is_unicode(key)
    }
    return {key: None if key in parts else value for key, value in request.items()}, parts


def prefix_lengths(kind: str, length: int) -> list[int]:
    """Where a part of this length has its marks, the last first; 0 needs none."""
    found, distance = [length], _STEP[kind]
    while distance < length:
        found.append(length - distance)
        distance *= 2
    return found


def prefix_states(
    part: RequestPart, at: Iterable[int], known: PrefixStates, encode: Encode
) -> dict[int, PrefixState]:
    """The states at these positions; what is `known` of them is not computed again."""
    state = PrefixState(hashlib.blake2b(part.kind.encode(), digest_size=_SIZE), 0)
    position, found = 0, {}
    for following in sorted({*at, *known}):
        if following in known:
            state = known[following]
        elif following > position:
            state = _after(state, part.kind, part.items[position:following], encode)
        position = following
        found[following] = state
    return found


def _after(state: PrefixState, kind: str, items: Any, encode: Encode) -> PrefixState:
    hashed = state.hash.copy()
    data = items.encode() if kind == TEXT else encode(items)
    if kind == TEXT:
        hashed.update(data)
    else:  # without the array's brackets: so it is the same in one piece and in many
        hashed.update(memoryview(data)[1:-1])
        hashed.update(b",")
    return PrefixState(hashed, state.size + len(data))


def part_kinds(parts: Mapping[str, RequestPart]) -> list[list[str]]:
    return [[key, part.kind] for key, part in parts.items()]


def skeleton_digest(skeleton: Mapping[str, Any], kinds: list[list[str]], encode: Encode) -> bytes:
    return digest(encode([skeleton, kinds]))


def long_strings(
    parts: Mapping[str, RequestPart], response: Any, most: int | None = _STRINGS
) -> dict[bytes, str]:
    """By digest: long strings of the last items of lists, and of the response.

    The next request repeats them outside of what it shares: the reply as one of its messages, and
    the last messages where a client moves its marks for the provider's cache.
    """
    values = [response]
    for part in parts.values():
        if part.kind == LIST:
            values += part.items[-_LAST_ITEMS:]
    found = ((string_digest(text), text) for text in _strings(values, most))
    return {digest: text for digest, text in found if digest}


def string_digest(text: str) -> bytes | None:
    """None for a string that is short, or no Unicode."""
    return digest(text.encode()) if len(text) >= _LONG and _is_unicode(text) else None


def _is_unicode(text: Any) -> bool:
    """Lone surrogates, which JSON can write, are none."""
    try:
        return isinstance(text, str) and (text.isascii() or bool(text.encode()))
    except UnicodeEncodeError:
        return False


def digest(data: bytes) -> bytes:
    return blake2b(data, _SIZE)


def _part(value: Any) -> RequestPart:
    if isinstance(value, list):
        return RequestPart(LIST, value)
    if _is_unicode(value):
        return RequestPart(TEXT, value)
    return RequestPart(VALUE, [value])


def _is_small(value: Any) -> bool:
    room, todo = _SMALL, [value]
    while todo and room > 0:
        item = todo.pop()
        room -= 4
        if isinstance(item, str):
            room -= len(item)
        elif isinstance(item, list | dict):
            if len(item) > room:
                return False
            todo += item.values() if isinstance(item, dict) else item
    return room > 0


def _strings(values: list[Any], most: int | None) -> Iterator[str]:
    """Level by level: messages are higher up than log-probabilities are."""
    for item in islice(values, most):  # which grows meanwhile
        if isinstance(item, str):
            if len(item) >= _LONG:
                yield item
        elif isinstance(item, dict):
            values += item.values()
        elif isinstance(item, list):
            values += item

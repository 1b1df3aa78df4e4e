"""Requests as what they add to an earlier request of the same rollout.

The client of a conversation sends all of it again with every call. Stored is what is new:
`[skeleton, {key: [n, items]}, [[path, digest], ...]]`, read as

- the skeleton, or null for the earlier one's;
- of each part the first `n` items of the earlier one, then these items. A part that is not
  named is the earlier one;
- at each path, in place of "", the long string of the earlier turn that has this digest.

The earlier turn is named by the column `request_base`; a request without one is stored whole.
Digests of 64 bits are compared (`request_fingerprint`): writing a turn reads no earlier text.
Reading proves every request against its own fingerprint (`request_restore`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tracegrad.events import Json
from tracegrad.jsonutil import dump_json
from tracegrad.store.encoding.request_fingerprint import (
    TEXT,
    Encode,
    PartFingerprint,
    PrefixStates,
    RequestFingerprint,
    RequestPart,
    encode_any,
    encode_plain,
    long_strings,
    part_kinds,
    prefix_lengths,
    prefix_states,
    skeleton_digest,
    split_request,
    string_digest,
)

_MIN_SHARED_BYTES = 64  # bytes that must be shared; below it a request is stored whole

RepeatedString = tuple[list[str | int], str]  # path from the part's key, digest in hex


class BaseCandidate(NamedTuple):
    turn_id: str
    fingerprint: RequestFingerprint


class RequestDelta(NamedTuple):
    """How a request is stored: `text` becomes JSON."""

    base: str | None
    text: Any
    fingerprint: bytes


def make_delta(request: Json, response: Any, earlier: Sequence[BaseCandidate]) -> RequestDelta:
    """`request` as a delta to the one of `earlier` that it shares most with, the first among
    equals.

    RecursionError: it is nested too deeply for JSON.
    """
    try:
        return _make_delta(request, response, earlier, encode_plain)
    except TypeError:
        # Not plain JSON. What JSON makes of it is what will be read, so that is compared.
        return _make_delta(json.loads(dump_json(request)), response, earlier, encode_any)


def _make_delta(
    request: Json, response: Any, earlier: Sequence[BaseCandidate], encode: Encode
) -> RequestDelta:
    skeleton, parts = split_request(request)
    trails = {key: _compared(key, part, earlier, encode) for key, part in parts.items()}
    marks = RequestFingerprint(
        skeleton_digest(skeleton, part_kinds(parts), encode),
        {key: _part_fingerprint(part, trails[key]) for key, part in parts.items()},
        frozenset(long_strings(parts, response)),
    )
    base, kept = _best(parts, trails, earlier)
    if base is None:
        return RequestDelta(None, request, marks.encode())
    same = marks.skeleton == base.fingerprint.skeleton
    text = [None if same else skeleton, *_added_items(parts, kept, base.fingerprint)]
    return RequestDelta(base.turn_id, text, marks.encode())


def _compared(
    key: str, part: RequestPart, earlier: Sequence[BaseCandidate], encode: Encode
) -> PrefixStates:
    """Its states wherever it, or the same part of an earlier request, has marks."""
    length = len(part.items)
    at = set(prefix_lengths(part.kind, length))
    for one in earlier:
        theirs = one.fingerprint.parts.get(key)
        if theirs is not None and theirs.kind == part.kind:
            at.update(position for position in theirs.digests if position <= length)
    return prefix_states(part, at, {}, encode)


def _part_fingerprint(part: RequestPart, states: PrefixStates) -> PartFingerprint:
    length = len(part.items)
    at = prefix_lengths(part.kind, length)
    return PartFingerprint(
        part.kind, length, {position: states[position].digest for position in at}
    )


def _best(
    parts: Mapping[str, RequestPart],
    trails: Mapping[str, PrefixStates],
    earlier: Sequence[BaseCandidate],
) -> tuple[BaseCandidate | None, Mapping[str, int]]:
    """Who shares most bytes, and how many items of each part."""
    best: BaseCandidate | None = None
    best_kept: Mapping[str, int] = {}
    most = _MIN_SHARED_BYTES
    for one in earlier:
        kept = {
            key: _kept(part, trails[key], one.fingerprint.parts.get(key))
            for key, part in parts.items()
        }
        size = sum(trails[key][n].size for key, n in kept.items() if n)
        if size > most:
            best, best_kept, most = one, kept, size
    return best, best_kept


def _kept(part: RequestPart, states: PrefixStates, theirs: PartFingerprint | None) -> int:
    if theirs is None or theirs.kind != part.kind:
        return 0
    for n, digest in theirs.digests.items():  # the largest first
        if n in states and states[n].digest == digest:
            return n
    return 0


def _added_items(
    parts: Mapping[str, RequestPart], kept: Mapping[str, int], base: RequestFingerprint
) -> tuple[dict[str, tuple[int, Any]], list[RepeatedString]]:
    news: dict[str, tuple[int, Any]] = {}
    repeated: list[RepeatedString] = []
    for key, part in parts.items():
        n = kept[key]
        if n == len(part.items) and n == base.parts[key].length:
            continue
        rest = part.items[n:]
        if part.kind != TEXT and base.strings:
            rest = _without(base.strings, rest, [key], repeated)
        news[key] = (n, rest)
    return news, repeated


def _without(
    known: frozenset[bytes], value: Any, path: list[str | int], found: list[RepeatedString]
) -> Any:
    """`value` with "" for strings that are known; `found` gets where they stood."""
    if isinstance(value, str):
        digest = string_digest(value)
        if digest is None or digest not in known:
            return value
        found.append((path, digest.hex()))
        return ""
    if isinstance(value, list):
        return [_without(known, item, [*path, i], found) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _without(known, item, [*path, key], found) for key, item in value.items()}
    return value

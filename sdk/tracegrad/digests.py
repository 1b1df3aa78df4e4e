"""BLAKE2b of bytes that come again.

The prompts of attempts at one task, and the messages that every turn of a conversation repeats, are
hashed for several purposes with every call. To find a digest takes a quarter of the time that
making it takes.
"""

from __future__ import annotations

import hashlib

from tracegrad.sized_cache import SizedCache

MOST_BYTES = 16 << 20
LARGEST_BYTES = MOST_BYTES // 8  # of one text
SMALLEST_BYTES = 2048  # of a text whose digest is worth a place

# By size, bytes.
_known: dict[int, SizedCache[bytes]] = {
    size: SizedCache(MOST_BYTES // 2, smallest=SMALLEST_BYTES, largest=LARGEST_BYTES)
    for size in (8, 16)
}


def blake2b(data: bytes, size: int) -> bytes:
    """The digest, 8 or 16 bytes."""
    if len(data) < SMALLEST_BYTES:
        return hashlib.blake2b(data, digest_size=size).digest()
    known = _known[size]
    found = known.get(data)
    if found is None:
        found = hashlib.blake2b(data, digest_size=size).digest()
        known.add(data, found, size)
    return found

"""How many values a JSON text holds, and what they take as Python objects, before it is parsed.

32 MiB of `[{},{},...]` become 800 MiB of dictionaries: it is the number of values that has to be
bounded, beside the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Bytes of memory, at most: an object or list with its place in another, and any other value or key.
CONTAINER_BYTES = 256
VALUE_BYTES = 96
# A piece at a time: what looks at one holds Python's lock for a millisecond or less.
_PIECE = 256 << 10


def count_punctuation(raw: bytes) -> tuple[int, int]:
    """How many opening brackets, and how many commas and colons: also those inside of strings,
    so a value has at least one of these or is the only one."""
    opening = between = 0
    codes = np.frombuffer(raw, dtype=np.uint8)
    for start in range(0, len(codes), _PIECE):
        piece = codes[start : start + _PIECE]
        # `[` and `{` differ in one bit.
        opening += int(np.count_nonzero((piece & 0xDF) == ord("[")))
        between += int(np.count_nonzero(piece == ord(",")))
        between += int(np.count_nonzero(piece == ord(":")))
    return opening, between


def count_punctuation_outside_strings(raw: bytes, most: int) -> tuple[int, int]:
    """As `punctuation`, without what stands in strings: slower, for texts full of it. Ends at the
    first piece that makes it more than `most`."""
    opening = between = 0
    for piece in _outside_strings(raw):
        opening += piece.count(b"[") + piece.count(b"{")
        between += piece.count(b",") + piece.count(b":")
        if opening + between > most:
            break
    return opening, between


def parsed_memory(raw: bytes, opening: int, between: int) -> int:
    """Bytes that a text takes as objects, and written as JSON once more, for the engine."""
    # One letter that is not Latin makes four bytes of every letter of its string; and what is
    # written of such a string is kept beside it.
    letters = 1 if raw.isascii() and not _escapes(raw) else 5
    return (letters + 1) * len(raw) + opening * CONTAINER_BYTES + between * VALUE_BYTES


def _escapes(raw: bytes) -> bool:
    r"""Whether there is a `\u`. NumPy finds it ten times as fast as `in`, which halts at every `\n`
    of a text."""
    codes = np.frombuffer(raw, dtype=np.uint8)
    for start in range(0, len(codes), _PIECE):
        piece = codes[start : start + _PIECE + 1]
        if np.any((piece[:-1] == ord("\\")) & (piece[1:] == ord("u"))):
            return True
    return False


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    inside, start = 0, 0
    while start < len(raw):
        piece = raw[start : start + _PIECE]
        start += len(piece)
        # Pairs go first: what then stands before a quote is what escapes it.
        piece = piece.replace(b"\\\\", b"")
        if piece.endswith(b"\\"):
            piece = piece[:-1]
            start += 1  # the escaped one, which begins the next piece
        parts = piece.replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2

"""English that every Python has, for tests whose sizes must be real."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics


@cache
def _english() -> str:
    return " ".join(" ".join(topics[name].split()) for name in sorted(topics))


def prose(start: int, length: int) -> str:
    """`length` characters of it, from a place that `start` chooses."""
    text = _english()
    begin = start * 97 % (len(text) - length)
    return text[begin : begin + length]

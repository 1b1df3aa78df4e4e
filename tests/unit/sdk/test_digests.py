"""Digests that come again are the ones that hashlib makes, and what is kept is bounded."""

from __future__ import annotations

import hashlib

import pytest

from tracegrad import digests
from tracegrad.digests import blake2b
from tracegrad.sized_cache import UNUSED_S, SizedCache


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("length", [0, digests.SMALLEST_BYTES - 1, digests.SMALLEST_BYTES, 50_000])
def test_a_digest_is_the_same_when_it_comes_again(length: int, size: int) -> None:
    data = b"x" * length
    expected = hashlib.blake2b(data, digest_size=size).digest()
    assert [blake2b(data, size), blake2b(bytes(bytearray(data)), size)] == [expected, expected]
    assert blake2b(data + b"y", size) != expected


def test_a_cache_keeps_what_was_asked_for_last_and_no_more_than_it_may() -> None:
    cache: SizedCache[int] = SizedCache(1000, smallest=10, largest=300)
    keys = [b"%010d" % number for number in range(20)]
    for number, key in enumerate(keys):
        cache.add(key, number, 90)
        assert cache.get(keys[0]) == 0
        assert cache.size <= 1000
    assert cache.get(keys[-1]) == 19
    assert cache.get(keys[1]) is None
    size = cache.size
    cache.add(b"short", 1, 1)
    cache.add(b"large".ljust(10), 1, 300)
    cache.add(keys[0], 7, 90)
    assert (cache.size, cache.get(keys[0])) == (size, 0)


def test_what_nobody_asks_for_is_dropped_after_a_while() -> None:
    now = [0.0]
    cache: SizedCache[int] = SizedCache(1000, smallest=1, largest=300, clock=lambda: now[0])
    for number, key in enumerate((b"asked for", b"forgotten", b"late")):
        now[0] = number * UNUSED_S / 2
        cache.add(key, number, 10)
        assert cache.get(b"asked for") == 0
    now[0] += UNUSED_S / 2 + 1
    cache.add(b"new", 3, 10)
    found = [cache.get(key) for key in (b"asked for", b"forgotten", b"late", b"new")]
    assert found == [0, None, 2, 3]
    assert cache.size == sum(map(len, (b"asked for", b"late", b"new"))) + 30

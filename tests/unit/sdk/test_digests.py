"""Digests that come again are the ones that hashlib makes, and what is kept is bounded."""

from __future__ import annotations

import hashlib

import pytest

from tracegrad import digests
from tracegrad.digests import blake2b
from tracegrad.sized_cache import SizedCache


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

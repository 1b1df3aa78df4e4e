"""Calls of two windows whose replies are of equal lengths: as many of each length in both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.soak.traffic import Call


def of_equal_lengths(
    earlier: Sequence[Call], later: Sequence[Call]
) -> tuple[list[Call], list[Call]]:
    """What is left of both, in their order: a model in training says more or less than it did, and
    a longer reply takes longer without anything having become slower.

    Lengths are equal that have as many bits: 1, 2 to 3, 4 to 7 tokens. Where one window has more
    calls of a length, those that stay are spread over all of its time.
    """
    first, second = _by_length(earlier), _by_length(later)
    left: tuple[list[int], list[int]] = ([], [])
    for length in first.keys() & second.keys():
        count = min(len(first[length]), len(second[length]))
        for places, side in zip((first[length], second[length]), left, strict=True):
            side += _spread(places, count)
    return [earlier[at] for at in sorted(left[0])], [later[at] for at in sorted(left[1])]


def _by_length(calls: Sequence[Call]) -> dict[int, list[int]]:
    """Where in `calls` those of a length are."""
    places: dict[int, list[int]] = defaultdict(list)
    for at, call in enumerate(calls):
        places[call.tokens.bit_length()].append(at)
    return places


def _spread(places: Sequence[int], count: int) -> list[int]:
    picks = (np.arange(count) + 0.5) * len(places) / count
    return [places[int(pick)] for pick in picks]

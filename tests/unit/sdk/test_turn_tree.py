"""What all that compare turns share."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.turn_tree import Sliceable, common_prefix

IDS = st.lists(st.integers(0, 2), max_size=20)


@pytest.mark.parametrize(
    "made",
    [list, lambda ids: array("i", ids), lambda ids: np.array(ids, np.int32), lambda ids: str(ids)],
    ids=["list", "array", "numpy", "text"],
)
@given(start=IDS, a=IDS, b=IDS)
def test_the_common_prefix_ends_where_the_first_item_differs(
    made: Callable[[Sequence[int]], Sliceable], start: list[int], a: list[int], b: list[int]
) -> None:
    one, other = made(start + a), made(start + b)
    pairs = ((one[i], other[i]) for i in range(min(len(one), len(other))))
    expected = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common_prefix(one, other) == expected

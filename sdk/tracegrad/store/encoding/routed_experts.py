"""The `.npy` file of `Turn.routed_experts`: its shape, and its bytes in an order that compresses.

Of 8 experts in 128 a byte holds 7 bits, whatever zstd does. What is left to gain is that each
layer has favourites of its own, so each layer gets tables of its own: a frame of its zstd's, or
one for some layers together where the turn has few tokens.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

_PREAMBLE = 10  # bytes: magic, version 1.0, the header's length
# As `numpy.save` writes it of an array in C order, on the machines that engines run on.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(\|u1|<u2|<i4)', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)
_ITEMS = {b"|u1": 1, b"<u2": 2, b"<i4": 4}
_FRAME = 1024  # bytes of planes below which tables take more than they save


class RoutingShape(NamedTuple):
    """An array [tokens, layers, k] of items of so many bytes, that begins at byte `start`."""

    tokens: int
    layers: int
    k: int
    item: int
    start: int

    @property
    def size(self) -> int:
        return self.tokens * self.layers * self.k * self.item


def routing_shape(file: bytes) -> RoutingShape:
    """ValueError: it is no such file."""
    header = _HEADER.match(file)
    if header is None or int.from_bytes(file[8:_PREAMBLE], "little") != header.end() - _PREAMBLE:
        raise ValueError("it is no .npy file of [tokens, layers, k] in uint8, uint16 or int32")
    tokens, layers, k = map(int, header.groups()[1:])
    shape = RoutingShape(tokens, layers, k, _ITEMS[header[1]], header.end())
    if not shape.size:
        raise ValueError(f"[{tokens}, {layers}, {k}] is an array without items")
    if len(file) != shape.start + shape.size:
        raise ValueError(
            f"{len(file) - shape.start} bytes are no array of {shape.size}: it was cut, or joined"
        )
    return shape


def check_routing(file: bytes, tokens: int) -> RoutingShape:
    """`tokens`: of the turn's prompt and completion. ValueError: the file cannot be theirs."""
    shape = routing_shape(file)
    if shape.tokens >= tokens:
        raise ValueError(f"{shape.tokens} tokens of a turn of {tokens}, whose last was never read")
    return shape


def to_planes(file: bytes) -> list[bytes]:
    """The file's header, and the planes of its layers: by layer, by byte of an item, by token, by
    k. The pieces joined are what `from_planes` reads; ValueError: it is no such file."""
    import numpy as np  # late: only who has expert routing needs it

    shape = routing_shape(file)
    items = np.frombuffer(file, np.uint8, offset=shape.start)
    planes = items.reshape(shape.tokens, shape.layers, shape.k, shape.item).transpose(1, 3, 0, 2)
    layer = shape.size // shape.layers
    some = -(-_FRAME // layer)
    bounds = [*range(0, shape.layers, some), shape.layers]
    return [file[: shape.start], *(planes[one:next_].tobytes() for one, next_ in pairwise(bounds))]


def from_planes(content: bytes) -> bytes:
    """The very file. ValueError: there is none in it."""
    import numpy as np

    shape = routing_shape(content)
    planes = np.frombuffer(content, np.uint8, offset=shape.start)
    items = planes.reshape(shape.layers, shape.item, shape.tokens, shape.k).transpose(2, 0, 3, 1)
    return content[: shape.start] + items.tobytes()

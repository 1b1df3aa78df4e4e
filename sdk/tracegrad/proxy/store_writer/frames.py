"""What a proxy and the process that writes its store say to each other, over a pair of sockets.

A frame is a kind, a number, the length of what follows, and that: pickled, where it is no text.
Nobody else can reach these sockets, so that nobody else's pickles are read.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from tracegrad.log_format import LogFormat

_HEAD = struct.Struct("<BQQ")
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """The first seven are the proxy's; a number is that of a submission, or of a question."""

    OPEN = 1  # an `Opening`
    SUBMIT = 2  # events
    WITHDRAW = 3  # the reason, as text
    ABANDON = 4
    DOUBT = 5  # ids of turns
    PING = 6
    BYE = 7  # that was all; without it, whoever waited for answers is gone
    DONE = 8  # a submission is on the disk, or turns are marked
    FAILED = 9  # with this exception
    PONG = 10
    UNACKNOWLEDGED = 11  # so many turns more (`WriterLoad`); the number says how many


@dataclass(frozen=True, slots=True)
class Opening:
    """What the process has to know. `url` holds the store's password; `remembered`: turns
    (`remember_turns`); `worker`: the only one that it writes for, if any."""

    url: str
    log_format: LogFormat
    remembered: int
    reconnect_s: float
    worker: int | None = None


class WireFrame(NamedTuple):
    kind: int
    number: int
    payload: bytes

    def value(self) -> Any:
        return pickle.loads(self.payload)


def head(kind: Kind, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, number, len(payload))


def encode(kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
    return head(kind, number, payload) + payload


def pickled(value: object) -> bytes:
    """Raises what pickle does of values that have no bytes: TypeError, PicklingError,
    RecursionError and others."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_frame(stream: Readable) -> WireFrame | None:
    """The next; None at the end, which may be in the middle of one."""
    try:
        return _read_frame(stream)
    except ConnectionError:  # the proxy has ended with answers that it had not read
        return None


def _read_frame(stream: Readable) -> WireFrame | None:
    begin = stream.read(HEAD_BYTES)
    if len(begin) < HEAD_BYTES:
        return None
    kind, number, length = _HEAD.unpack(begin)
    payload = stream.read(length)
    return WireFrame(kind, number, payload) if len(payload) == length else None


class FrameReader:
    """Frames out of what a socket gives piece by piece."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[WireFrame]:
        data = self._rest + data if self._rest else data
        at = 0
        while len(data) - at >= HEAD_BYTES:
            kind, number, length = _HEAD.unpack_from(data, at)
            end = at + HEAD_BYTES + length
            if end > len(data):
                break
            yield WireFrame(kind, number, data[at + HEAD_BYTES : end])
            at = end
        self._rest = data[at:]

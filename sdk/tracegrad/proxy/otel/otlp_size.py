"""How many fields a protobuf of spans holds, counted in its bytes before it is parsed.

Two bytes of protobuf are an attribute, which takes a hundred bytes of memory: 32 MiB of them would
take gigabytes. Fields that protobuf would skip count too.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

# The messages of an ExportTraceServiceRequest: each one's fields that hold messages in turn.
_REQUEST, _RESOURCE_SPANS, _RESOURCE, _SCOPE_SPANS, _SCOPE, _SPAN = range(6)
_EVENT, _LINK, _STATUS, _KEY_VALUE, _ANY_VALUE, _ARRAY, _KV_LIST, _ENTITY = range(6, 14)
_INNER: dict[int, dict[int, int]] = {
    _REQUEST: {1: _RESOURCE_SPANS},
    _RESOURCE_SPANS: {1: _RESOURCE, 2: _SCOPE_SPANS},
    _RESOURCE: {1: _KEY_VALUE, 3: _ENTITY},
    _SCOPE_SPANS: {1: _SCOPE, 2: _SPAN},
    _SCOPE: {3: _KEY_VALUE},
    _SPAN: {9: _KEY_VALUE, 11: _EVENT, 13: _LINK, 15: _STATUS},
    _EVENT: {3: _KEY_VALUE},
    _LINK: {4: _KEY_VALUE},
    _STATUS: {},
    _KEY_VALUE: {2: _ANY_VALUE},
    _ANY_VALUE: {5: _ARRAY, 6: _KV_LIST},
    _ARRAY: {1: _ANY_VALUE},
    _KV_LIST: {1: _KEY_VALUE},
    _ENTITY: {},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields_in(data: bytes, most: int) -> int:
    """The number of fields, or `most` + 1 where there are more. Raises DecodeError for what is
    no protobuf."""
    count = 0
    # Messages whose end is still to come: where each ends, and what it is.
    stack = [(len(data), _REQUEST)]
    at = 0
    try:
        while stack and count <= most:
            end, kind = stack[-1]
            if at >= end:
                stack.pop()
                continue
            count += 1
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _BYTES:
                length, at = _varint(data, at)
                inner = _INNER[kind].get(tag >> 3)
                if inner is None:
                    at += length
                else:
                    stack.append((at + length, inner))
            elif wire == _VARINT:
                _, at = _varint(data, at)
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            else:
                raise DecodeError(f"wire type {wire}")  # groups: OTLP has none
    except IndexError:
        raise DecodeError("it breaks off") from None
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise DecodeError("a number without end")

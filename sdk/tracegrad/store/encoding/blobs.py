"""Tokens, log-probabilities and JSON as compressed bytes, and the digest of a token context.

A blob is a tag byte and zstd frames without their magic number:

- 1 to 4: an array of 4-byte items, by so many byte planes: all lowest bytes, then all second
  ones, ... Planes of zeros at the top are left out (ids have no fourth one). The top plane has
  a frame of its own: it is what compresses best, and does not when mixed with the others;
- 5: a `.npy` file of expert routing, its header first, then its bytes by layer (`routed_experts`);
- 0x10: JSON text; and 0x20 where it needed Python's own writer (integers beyond 64 bits, lone
  surrogates); and 0x40 where it is short and was compressed with `_PHRASES`.

Blobs of revision 0001 are whole zstd frames (their first byte is 0x28) of little-endian items
or of JSON text.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import orjson
import zstandard

from tracegrad.jsonutil import encode_with_orjson, encode_with_python
from tracegrad.store.encoding.routed_experts import from_planes, to_planes
from tracegrad.store.errors import StoreCorrupt

_LEVEL, _SHORT_LEVEL = 1, 3
_ITEM = 4  # bytes
_LITTLE = sys.byteorder == "little"
_ROUTING = 5
_JSON, _ODD, _SHORT = 0x10, 0x20, 0x40
_FIRST_REVISION = 0x28
_SHORT_TEXT = 8192  # bytes; longer ones compress better by themselves
_AT_ONCE = 16384  # bytes of pieces from which zstd is called for all of them together

# What texts of calls have in common; zstd refers to it instead of storing it with each of them.
# Stored texts depend on every byte: another version of it needs another tag.
_PHRASES = (
    b'"},"output":[{"type":"function_call","call_id":"call_","id":"fc_","status":"completed"},'
    b'{"type":"tool_use","id":"toolu_","name":"","input":{"path":"","command":"","content":"",'
    b'"file_path":"/"}},{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_",'
    b'"content":[{"type":"text","text":"","cache_control":{"type":"ephemeral"}}],'
    b'"is_error":false}]},{"role":"tool","tool_call_id":"call_","name":"","content":'
    b'"{\\"output\\":\\""},{"role":"user","content":"{"id":"chatcmpl-","object":'
    b'"chat.completion","created":17,"model":"","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":null,"refusal":null,"annotations":null,"audio":null,'
    b'"function_call":null,"tool_calls":[{"id":"call_","type":"function","function":{"name":"",'
    b'"arguments":"{\\"path\\":\\"/\\",\\"command\\":\\""}}],"reasoning":null},"logprobs":null,'
    b'"finish_reason":"tool_calls","finish_reason":"length","finish_reason":"stop",'
    b'"stop_reason":null}],"service_tier":null,"system_fingerprint":null,"usage":'
    b'{"prompt_tokens":,"total_tokens":,"completion_tokens":,"prompt_tokens_details":null},'
    b'"prompt_logprobs":null,"kv_transfer_params":null}'
)
_DICTIONARY = zstandard.ZstdCompressionDict(_PHRASES, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
_MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS


class _Zstd(threading.local):
    """A zstd context serves one thread at a time."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level
        self.packs = zstandard.ZstdCompressor(
            compression_params=parameters(_LEVEL, format=_MAGICLESS)
        )
        self.packs_short = zstandard.ZstdCompressor(
            dict_data=_DICTIONARY, compression_params=parameters(_SHORT_LEVEL, format=_MAGICLESS)
        )
        self.unpacks = zstandard.ZstdDecompressor(format=_MAGICLESS)
        self.unpacks_short = zstandard.ZstdDecompressor(dict_data=_DICTIONARY, format=_MAGICLESS)
        self.unpacks_first_revision = zstandard.ZstdDecompressor()


_zstd = _Zstd()


class BlobContent(NamedTuple):
    """What a blob is made of: `pack_blobs` turns many of them into blobs at once."""

    tag: int
    pieces: Sequence[bytes]


def array_content(values: array[int] | array[float]) -> BlobContent:
    raw = _little_endian(values)
    planes = [raw[i::_ITEM] for i in range(_ITEM)]
    while len(planes) > 1 and planes[-1].count(0) == len(values):
        planes.pop()
    pieces = [b"".join(planes[:-1]), planes[-1]]
    return BlobContent(len(planes), [piece for piece in pieces if piece])


def routing_content(file: bytes) -> BlobContent:
    """ValueError: the file is none of `Turn.routed_experts`."""
    return BlobContent(_ROUTING, to_planes(file))


def json_content(value: Any) -> BlobContent:
    try:
        tag, text = _JSON, encode_with_orjson(value)
    except TypeError:
        tag, text = _JSON | _ODD, encode_with_python(value)
    return BlobContent(tag | _SHORT if len(text) < _SHORT_TEXT else tag, [text])


def pack_blobs(contents: Sequence[BlobContent]) -> list[bytes]:
    """The blob of each; no bytes at all for an array without items."""
    packed = {
        short: _compress(compressor, [c for c in contents if bool(c.tag & _SHORT) == short])
        for short, compressor in ((False, _zstd.packs), (True, _zstd.packs_short))
    }
    return [
        b"".join((bytes((tag,)), *islice(packed[bool(tag & _SHORT)], len(pieces))))
        if pieces
        else b""
        for tag, pieces in contents
    ]


def _compress(
    compressor: zstandard.ZstdCompressor, contents: Sequence[BlobContent]
) -> Iterator[bytes]:
    """The frames of all their pieces.

    zstd works without the interpreter's lock, and a thread that gives the lock up for long in a
    busy process waits for it again, up to 5 ms. So it is given up once for many pieces.
    """
    pieces: list[bytes | bytearray | memoryview] = [p for c in contents for p in c.pieces]
    if sum(map(len, pieces)) < _AT_ONCE:
        return map(compressor.compress, pieces)
    frames = compressor.multi_compress_to_buffer(pieces)
    return (frames[i].tobytes() for i in range(len(frames)))


def unpack_ids(blob: bytes) -> array[int]:
    return _unpack_array("i", blob)


def unpack_logprobs(blob: bytes) -> array[float]:
    return _unpack_array("f", blob)


def unpack_routing(blob: bytes | None) -> bytes | None:
    """The very file that was packed."""
    if blob is None:
        return None
    if blob[:1] != bytes((_ROUTING,)):
        raise StoreCorrupt(f"stored expert routing has the unknown tag {blob[:1].hex()}")
    try:
        return from_planes(_decompress(blob))
    except ValueError as error:
        raise StoreCorrupt(f"its expert routing: {error}") from error


def unpack_json(blob: bytes | None) -> Any:
    if blob is None:
        return None
    if blob[0] != _FIRST_REVISION and blob[0] & ~(_ODD | _SHORT) != _JSON:
        raise StoreCorrupt(f"a stored text has the unknown tag {blob[0]}")
    text = _decompress(blob)
    try:
        # orjson reads integers beyond 64 bits as floats; its own texts have none.
        return orjson.loads(text) if blob[0] & (_JSON | _ODD) == _JSON else json.loads(text)
    except ValueError as error:
        raise StoreCorrupt(f"a stored text is no JSON: {error}") from error


class ContextDigest:
    """BLAKE2b (128 bits) over token ids, fed piece by piece."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, ids: array[int] | memoryview) -> ContextDigest:
        self._hash.update(ids if _LITTLE else _little_endian(array("i", ids)))
        return self

    def copy(self) -> ContextDigest:
        """One that goes on from here, while this one stays as it is."""
        copied = ContextDigest.__new__(ContextDigest)
        copied._hash = self._hash.copy()
        return copied

    def value(self) -> bytes:
        return self._hash.digest()


def _little_endian(values: array[Any]) -> bytes:
    assert values.itemsize == _ITEM, values.typecode
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _unpack_array(typecode: str, blob: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    if not blob:
        return values
    raw = _decompress(blob)
    if blob[0] != _FIRST_REVISION:
        raw = _joined(raw, planes=blob[0])
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _joined(raw: bytes, planes: int) -> bytes:
    if not 1 <= planes <= _ITEM or len(raw) % planes:
        raise StoreCorrupt(f"{len(raw)} bytes are no array in {planes} byte planes")
    items = len(raw) // planes
    joined = bytearray(items * _ITEM)
    for plane in range(planes):
        joined[plane::_ITEM] = raw[plane * items : (plane + 1) * items]
    return bytes(joined)


def _decompress(blob: bytes) -> bytes:
    tag = blob[0]
    try:
        if tag == _FIRST_REVISION:
            return _zstd.unpacks_first_revision.decompress(blob)
        context = _zstd.unpacks_short if tag & _SHORT else _zstd.unpacks
        return context.decompressobj(read_across_frames=True).decompress(memoryview(blob)[1:])
    except zstandard.ZstdError as error:
        raise StoreCorrupt(f"a stored blob cannot be read: {error}") from error

"""Arrays and JSON as blobs: the same again to the last bit, and those of old stores too."""

from __future__ import annotations

import json
import random
import sys
from array import array
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from support.store.english_text import prose
from tracegrad.events import logprob_array, token_id_array
from tracegrad.store import StoreCorrupt
from tracegrad.store.encoding.blobs import (
    array_content,
    json_content,
    pack_blobs,
    unpack_ids,
    unpack_json,
    unpack_logprobs,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.lists(st.integers(0, 200_000) | INT32, max_size=40).map(token_id_array)
FLOATS = st.lists(st.floats(width=32), max_size=40).map(logprob_array)


def zipf_ids(count: int) -> array[int]:
    weights = [1 / rank for rank in range(1, 151_937)]
    return token_id_array(random.Random(1).choices(range(151_936), weights, k=count))


@given(st.lists(IDS, max_size=5), st.lists(FLOATS, max_size=5))
def test_arrays_come_back_bit_for_bit(ids: list[array[int]], floats: list[array[float]]) -> None:
    blobs = pack_blobs([array_content(values) for values in [*ids, *floats]])
    assert [unpack_ids(blob) for blob in blobs[: len(ids)]] == ids
    back = [unpack_logprobs(blob) for blob in blobs[len(ids) :]]
    assert [values.tobytes() for values in back] == [values.tobytes() for values in floats]


def test_no_items_are_no_bytes() -> None:
    assert pack_blobs([array_content(token_id_array()), array_content(logprob_array())]) == [
        b"",
        b"",
    ]
    assert pack_blobs([]) == []


def test_many_large_blobs_at_once_are_what_they_are_one_by_one() -> None:
    contents = [array_content(zipf_ids(n)) for n in (1, 9000, 300)]
    contents += [json_content({"t": prose(n, n)}) for n in (10, 7000, 9000, 200_000)]
    together = pack_blobs(contents)
    assert sum(map(len, together)) > 40_000, "large enough to be packed at once"
    assert unpack_ids(together[1]) == zipf_ids(9000)
    assert [unpack_json(blob)["t"] for blob in together[3:]] == [
        prose(n, n) for n in (10, 7000, 9000, 200_000)
    ]


def test_zipf_ids_and_scores_take_few_bytes_a_token() -> None:
    [ids, scores] = pack_blobs(
        [
            array_content(zipf_ids(8704)),
            array_content(logprob_array(-random.Random(2).expovariate(1) for _ in range(512))),
        ]
    )
    assert len(ids) / 8704 < 1.75
    assert len(scores) / 512 < 3.7


@pytest.mark.parametrize(
    "value",
    [None, 0, "", {}, [], {"big": 2**70, "é": ["\ud800", -0.0, 1e300]}, "x" * 10**6, [[]] * 9000],
    ids=str.split("null zero text object list odd long many"),
)
def test_json_comes_back(value: Any) -> None:
    [blob] = pack_blobs([json_content(value)])
    assert unpack_json(blob) == value


def test_integers_of_64_bits_stay_integers() -> None:
    for value in (2**63, 2**64 - 1, -(2**63), 2**64, 10**30):
        [blob] = pack_blobs([json_content({"n": value})])
        assert unpack_json(blob) == {"n": value}
        assert type(unpack_json(blob)["n"]) is int


def test_short_replies_are_smaller_than_their_frame() -> None:
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}],
        "usage": {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1},
    }
    [blob] = pack_blobs([json_content(reply)])
    assert len(blob) < len(json.dumps(reply)) / 2


def test_blobs_of_the_first_revision_are_read() -> None:
    compress = zstandard.ZstdCompressor(level=3).compress
    ids, scores = token_id_array([1, -5, 70_000]), logprob_array([-0.5, 0.0])
    for values in (ids, scores):
        if sys.byteorder == "big":
            values.byteswap()
    assert unpack_ids(compress(ids.tobytes())) == token_id_array([1, -5, 70_000])
    assert unpack_logprobs(compress(scores.tobytes())) == logprob_array([-0.5, 0.0])
    value = {"seed": 2**70, "é": "\ud800"}
    assert unpack_json(compress(json.dumps(value).encode())) == value


@pytest.mark.parametrize(
    "blob", [b"\x00", b"\x07", b"\x03garbage", b"\x10{", b"\x50\x00", b"(\xb5/\xfd1"]
)
def test_garbage_is_one_error(blob: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        unpack_json(blob)
    with pytest.raises(StoreCorrupt):
        unpack_ids(blob)

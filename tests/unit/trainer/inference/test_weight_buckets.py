"""What goes into buckets comes out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tracegrad_trainer.inference import weight_buckets
from tracegrad_trainer.inference.weight_buckets import (
    BUCKET_BYTES,
    BucketReader,
    TensorSpec,
    bucket_bytes,
    in_buckets,
    names_in_parts,
    places,
    unpack,
)

DTYPES = ["float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn", "int64"]
specs = st.builds(
    lambda dtype, shape: (dtype, shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 2000), max_size=2),
)


@given(st.lists(specs, max_size=12))
def test_buckets_keep_order_and_bounds(drawn: list[tuple[str, list[int]]]) -> None:
    named = [TensorSpec(f"t{i}", *spec) for i, spec in enumerate(drawn)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_buckets, "BUCKET_BYTES", 1 << 16)
        buckets = in_buckets(named)
    assert [spec for bucket in buckets for spec in bucket] == named
    for bucket in buckets:
        assert bucket_bytes(bucket) <= 1 << 16 or len(bucket) == 1
        ends = 0
        for place, spec in zip(places(bucket), bucket, strict=True):
            assert place.start >= ends
            assert place.start % spec.torch_dtype.itemsize == 0, "a view of that dtype"
            assert place.stop - place.start == spec.nbytes
            ends = place.stop


def test_what_is_read_is_what_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 100)
    torch.manual_seed(0)
    first = {
        "odd": torch.randn(3, 5).bfloat16(),
        "number": torch.tensor(2.5),
        "bytes": torch.arange(7, dtype=torch.int8),
    }
    second = {"large": torch.randn(40), "none": torch.empty(0, 4), "mask": torch.tensor([True])}
    save_file(first, tmp_path / "0.safetensors")
    save_file(second, tmp_path / "1.safetensors")
    paths = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    found = {}
    memory = set()
    with BucketReader(paths) as files:
        for bucket, flat in zip(files.buckets, files.read(), strict=True):
            found |= {name: tensor.clone() for name, tensor in unpack(flat, bucket)}
            memory.add(flat.untyped_storage().data_ptr())
        assert len(files.buckets) > 2
    assert len(memory) == 1, "one bucket is in memory at a time"
    assert found.keys() == (first | second).keys()
    for name, tensor in (first | second).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_one_tensor_may_be_larger_than_a_bucket() -> None:
    large = TensorSpec("head", "float32", [BUCKET_BYTES])
    [first, second] = in_buckets([large, TensorSpec("norm", "float32", [4])])
    assert (first, second) == ([large], [TensorSpec("norm", "float32", [4])])


def test_bad_input_is_named(tmp_path: Path) -> None:
    path = tmp_path / "0.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=f"{path}: "):
        BucketReader([str(path)])
    with pytest.raises(ValueError, match="w: 'Tensor' is no dtype of torch"):
        _ = TensorSpec("w", "Tensor", [1]).nbytes


def test_parts_name_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "PART_BYTES", 100)
    files = [str(tmp_path / "0.safetensors"), str(tmp_path / "1.safetensors")]
    save_file({"a": torch.zeros(8), "b": torch.zeros(100)}, files[0])
    save_file({"c": torch.zeros(4), "d": torch.zeros(4)}, files[1])
    parts = names_in_parts(files)
    assert sorted(name for part in parts for name in part) == ["a", "b", "c", "d"]
    assert ["b"] in parts
    assert len(parts) == 3

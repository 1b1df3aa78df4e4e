"""The safetensors files between trainer and vLLM."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tracegrad_trainer.inference import weight_files
from tracegrad_trainer.inference.weight_files import WeightFiles


def test_tensors_come_back_as_written(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "a": whole,
        "transposed": whole.T,
        "half": torch.full((2,), 0.5, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    [path] = WeightFiles(tmp_path).write(3, tensors.items())
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_two_names_of_one_tensor_are_both_written(tmp_path: Path) -> None:
    tied = torch.randn(4, 2)
    [path] = WeightFiles(tmp_path).write(1, [("embedding", tied), ("head", tied)])
    loaded = load_file(path)
    assert torch.equal(loaded["embedding"], tied)
    assert torch.equal(loaded["head"], tied)


def test_many_tensors_are_not_held_against_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture's adapters are tens of thousands, in one file."""
    asked = 0
    storage = torch.Tensor.untyped_storage

    def counted(tensor: torch.Tensor) -> torch.UntypedStorage:
        nonlocal asked
        asked += 1
        return storage(tensor)

    monkeypatch.setattr(weight_files, "save_file", lambda tensors, path: path.touch())
    monkeypatch.setattr(torch.Tensor, "untyped_storage", counted)
    many = [(f"w{i}", torch.ones(2)) for i in range(200)]
    WeightFiles(tmp_path).write(1, many)
    WeightFiles(tmp_path).write_adapter(1, many, {})
    assert asked <= 2 * 2 * len(many)


def test_large_models_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_SHARD_BYTES", 100)
    tensors = {f"w{i}": torch.full((15,), float(i)) for i in range(5)}  # 60 bytes each
    paths = WeightFiles(tmp_path).write(1, tensors.items())
    assert len(paths) == 3
    loaded = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert {name: tensor[0].item() for name, tensor in loaded.items()} == {
        f"w{i}": float(i) for i in range(5)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_finite_is_written_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Large weights too, the sum of which float16 cannot hold; a NaN among them is seen."""
    large = torch.full((3, 1000), 1e4, dtype=dtype)
    files = WeightFiles(tmp_path)
    [path] = files.write(1, [("w", large), ("none", large[:0])])
    assert torch.equal(load_file(path)["w"], large)
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = large.clone()
        broken[1, 7] = bad
        with pytest.raises(ValueError, match="w holds values that are not finite"):
            files.write(2, [("w", broken)])
    files.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, bad: float) -> None:
    with pytest.raises(ValueError, match="norm holds values that are not finite"):
        WeightFiles(tmp_path).write(1, [("norm", torch.tensor([1.0, bad]))])


def test_only_the_served_version_is_kept(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path)
    for version in (1, 2):
        files.write(version, [("w", torch.ones(1))])
    files.keep_only(2)
    assert [path.name for path in files.folder.iterdir()] == ["2"]
    files.close()
    assert list(tmp_path.iterdir()) == []


OWNER = """
import sys, time
from tracegrad_trainer.utils.scratch_folder import ScratchFolder
from pathlib import Path
print(ScratchFolder("tracegrad-weights", Path(sys.argv[1])).path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_trainer_left_is_swept_and_nothing_of_a_live_one(tmp_path: Path) -> None:
    """Whatever pids there are to be seen: only the lock counts."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            theirs = Path(owner.stdout.readline().strip())
            (theirs / "0.safetensors").touch()
            # As another pid namespace's would look: nobody of this name runs here.
            renamed = theirs.rename(tmp_path / f"tracegrad-weights-{_gone_pid()}-abc")
            ours = WeightFiles(tmp_path)
            assert renamed.exists()
        finally:
            owner.kill()
    WeightFiles(tmp_path).close()
    assert not renamed.exists()
    assert ours.folder.exists()


def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    theirs = tmp_path / "tracegrad-weights-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    WeightFiles(tmp_path).close()
    assert theirs.exists()


def _gone_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_no_room_says_how_much_is_needed_and_where(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write 4 MiB of weights to .* MiB free"):
            files.write(1, [("w", torch.ones(1 << 20))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

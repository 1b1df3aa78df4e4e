"""Checkpoints: all that a run needs to go on as if nothing had happened, whole or not at all."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from support.trainer import checkpoint_ranks
from support.trainer.checkpoint_ranks import drawn, learner, saved, step
from support.trainer.learners import apart, build, save_checkpoint, weights
from support.trainer.ranks import run_on_ranks
from support.trainer.row_samples import tiny_model
from tracegrad_trainer.engine import (
    CheckpointError,
    FsdpSettings,
    destroy_process_group,
    init_process_group,
    list_checkpoints,
    load_checkpoint,
)
from tracegrad_trainer.engine.checkpoint import save_load as module
from tracegrad_trainer.engine.checkpoint.manifest import verify_contents
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.config import AdamwImplementation, LoraSettings
from tracegrad_trainer.engine.random_state import capture_rng_state, restore_rng_state, seed_all


@pytest.fixture(scope="module", autouse=True)
def one_rank(folder: Path) -> Iterator[None]:
    init_process_group(FsdpSettings(device="cpu", threads=1))
    yield
    destroy_process_group()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_tied_head_is_saved_once_and_older_checkpoints_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("model", "other")):
        tiny_model(tmp_path / name, seed=seed, tied=True)

    def with_both_names(trained: Any) -> dict[str, Any]:
        found = module.get_state_dict(trained.model, trained.optimizer, options=module._OPTIONS)
        return dict(zip(("model", "optimizer"), found, strict=True))

    one = learner(tmp_path / "model")
    model: Any = one.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    step(one, 1)
    saved(one, tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_state", with_both_names)
        saved(one, tmp_path, 2)
    for number, heads in ((1, 0), (2, 1)):
        written = tmp_path / f"step-{number:08d}"
        names = FileSystemReader(written).read_metadata().state_dict_metadata
        assert sum(name == "model.lm_head.weight" for name in names) == heads
        other = learner(tmp_path / "other")
        load_checkpoint(other, written)
        assert equal(weights(other.model), weights(one.model))
        tied: Any = other.model
        assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_was_saved(
    folder: Path, tmp_path: Path
) -> None:
    one = learner(folder / "model")
    seed_all(5)
    step(one, 1)
    saved(one, tmp_path, 1, memory={"task": [0.5, 2]})
    numbers = drawn()
    metrics = step(one, 2)

    other = learner(folder / "other")
    seed_all(6)
    counters = load_checkpoint(other, tmp_path / "step-00000001")
    assert counters == {"memory": {"task": [0.5, 2]}}
    assert other.steps == 1
    assert drawn() == numbers
    assert step(other, 2) == metrics
    assert equal(weights(other), weights(one))


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_to_load_takes_no_step_of_the_optimizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    """With which torch would make the moments, out of gradients of all parameters at once."""
    one = build(folder / "model", moments=moments)
    step(one, 1)
    saved(one, tmp_path, 1)
    other = build(folder / "other", moments=moments)

    def refuse(**_: Any) -> None:
        pytest.fail("a step, and gradients of everything")

    with monkeypatch.context() as patched:
        patched.setattr(other.optimizer, "step", refuse)
        load_checkpoint(other, tmp_path / "step-00000001")
    assert step(other, 2) == step(one, 2)
    assert equal(weights(other), weights(one))


@pytest.mark.parametrize(("device", "chosen"), [("cuda:3", ["cuda:3"]), ("cpu", [])])
def test_the_writing_thread_stays_on_its_ranks_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[str]
) -> None:
    """A new thread is on the first one, where torch's writer would take some memory."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(str(device)))
    monkeypatch.setattr(module, "save", lambda *_, **__: seen.append("saved"))
    CheckpointSaver(tmp_path)._write({}, {"step": 1}, 0, torch.device(device))
    assert seen == [*chosen, "saved"]


@pytest.mark.parametrize(("then", "now"), [("foreach", "fused"), ("fused", "foreach")])
def test_a_checkpoint_does_not_say_how_adamw_is_computed(
    folder: Path, tmp_path: Path, then: AdamwImplementation, now: AdamwImplementation
) -> None:
    """A run takes the fast one, whatever its checkpoint was made with; a replay the recorded."""
    kept = {}
    for first, second in ((then, now), (now, now)):
        one = build(folder / "model", "ppo", adamw=first)
        step(one, 1)
        saved(one, tmp_path / first, 1)
        two = build(folder / "other", "ppo", adamw=second)
        load_checkpoint(two, tmp_path / first / "step-00000001")
        assert {(g["fused"], g["foreach"]) for g in two.optimizer.param_groups} == {
            (now == "fused" or None, now == "foreach" or None)
        }
        step(two, 2)
        kept[first] = weights(two)
    assert apart(kept[then], kept[now]) < 1e-5


def test_training_goes_on_while_what_was_copied_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(module, "save", slow)
    one = learner(folder / "model")
    step(one, 1)
    before = weights(one)
    saver = CheckpointSaver(tmp_path)
    counters: dict[str, Any] = {"memory": {"task": [1]}}
    saver.start(one, 1, counters)
    step(one, 2)
    counters["memory"]["task"].append(2)
    assert saver.busy
    assert list_checkpoints(tmp_path) == [], "what is not whole has no name yet"
    assert not equal(weights(one), before)
    may_write.set()
    saver.wait()
    fresh = learner(folder / "other")
    kept = load_checkpoint(fresh, tmp_path / "step-00000001")
    assert equal(weights(fresh), before)
    assert kept == {"memory": {"task": [1]}}


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(2, None, [5, 6]), (1, None, [6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6])],
)
def test_the_newest_stay_and_every_so_many(
    keep: int, keep_every: int | None, kept: list[int], tmp_path: Path
) -> None:
    for number in range(1, 7):
        (tmp_path / f"step-{number:08d}").mkdir()
    (tmp_path / ".step-00000007.partial").mkdir()
    CheckpointSaver(tmp_path).prune(keep=keep, keep_every=keep_every)
    assert list_checkpoints(tmp_path) == [tmp_path / f"step-{number:08d}" for number in kept]


def test_what_another_store_left_does_not_push_out_what_was_just_made(
    folder: Path, tmp_path: Path
) -> None:
    for number in (8, 9):  # a state folder that was given a new store, or one of a backup
        (tmp_path / f"step-{number:08d}").mkdir()
    one = learner(folder / "model")
    step(one, 1)
    for number in (1, 2):
        made = save_checkpoint(one, tmp_path, number, {}, keep=1)
    assert list_checkpoints(tmp_path) == [made, *(tmp_path / f"step-0000000{n}" for n in (8, 9))]


def test_a_value_head_and_adapters_come_back(folder: Path, tmp_path: Path) -> None:
    one = learner(folder / "model", valued=True)
    step(one, 1)
    saved(one, tmp_path / "value", 1)
    fresh = learner(folder / "model", valued=True)
    load_checkpoint(fresh, tmp_path / "value" / "step-00000001")
    assert step(fresh, 2) == step(one, 2)

    lora = LoraSettings(rank=2)
    adapted = learner(folder / "model", lora=lora)
    step(adapted, 1)
    where = saved(adapted, tmp_path / "lora", 1)
    kept = FileSystemReader(where).read_metadata().state_dict_metadata
    of_model = {name for name in kept if name.startswith("model.")}
    assert of_model, "the adapters"
    assert all(".lora_" in name for name in of_model), "and not the base"
    fresh = learner(folder / "model", lora=lora)
    load_checkpoint(fresh, where)
    assert step(fresh, 2) == step(adapted, 2)
    assert equal(weights(fresh), weights(adapted))


def test_every_random_number_generator_goes_on_where_it_was() -> None:
    seed_all(3)
    drawn()
    state = capture_rng_state()
    expected = [drawn() for _ in range(3)]
    seed_all(4)
    restore_rng_state(state)
    assert [drawn() for _ in range(3)] == expected


# What is not whole


@pytest.fixture
def two_steps(folder: Path, tmp_path: Path) -> Path:
    one = learner(folder / "model")
    saved(one, tmp_path, 1)
    saved(one, tmp_path, 2)
    return tmp_path


def refused(folder: Path, root: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(learner(folder / "model"), root / "step-00000002")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("part", ["__0_0.distcp", ".metadata", "counters.json"])
def test_a_missing_part_is_named_with_the_older_one_that_is_whole(
    part: str, folder: Path, two_steps: Path
) -> None:
    lost = two_steps / "step-00000002" / part
    lost.unlink()
    said = refused(folder, two_steps)
    assert f"checkpoint part {lost} is missing" in said
    assert f"go on from {two_steps / 'step-00000001'}" in said
    assert "checkpoint.resume_from=1" in said


def test_a_part_that_was_cut_off_is_named(folder: Path, two_steps: Path) -> None:
    part = two_steps / "step-00000002" / "__0_0.distcp"
    size = part.stat().st_size
    os.truncate(part, size - 1)
    assert f"{part} has {size - 1} bytes, not {size}" in refused(folder, two_steps)


def test_one_changed_byte_is_found(folder: Path, two_steps: Path) -> None:
    part = two_steps / "step-00000002" / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert f"{part} is damaged" in refused(folder, two_steps)
    found = []
    for rank in range(2):  # each of two would read some of the files
        try:
            verify_contents(part.parent, share=(rank, 2))
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1


@pytest.mark.parametrize(
    "content", ['{"files": {"a', '{"files": [1]}', '{"files": {"a": 3}}', "[]"]
)
def test_a_manifest_that_is_none_is_named(folder: Path, two_steps: Path, content: str) -> None:
    manifest = two_steps / "step-00000002" / "counters.json"
    manifest.write_text(content)
    assert f"{manifest} cannot be read" in refused(folder, two_steps)


def test_an_older_one_that_is_not_whole_is_not_offered(folder: Path, two_steps: Path) -> None:
    for name in ("step-00000001", "step-00000002"):
        (two_steps / name / ".metadata").unlink()
    assert "there is no older whole checkpoint" in refused(folder, two_steps)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    saved(learner(folder / "model"), tmp_path, 1)
    with pytest.raises(CheckpointError, match="value_head"):
        load_checkpoint(learner(folder / "model", valued=True), tmp_path / "step-00000001")


def test_what_cannot_be_written_is_one_error_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(CheckpointError, match="a-file"):
        saved(learner(folder / "model"), tmp_path / "a-file", 1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_manifest", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        saved(learner(folder / "model"), tmp_path / "full", 1)
    assert list((tmp_path / "full").iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_of_what_nobody_foresaw_has_written_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise MemoryError

    one = learner(folder / "model")
    saver = CheckpointSaver(tmp_path)
    monkeypatch.setattr(module, "file_digests", dies)
    saver.start(one, 1, {})
    with pytest.raises(CheckpointError, match="step-00000001 not written: its writer ended early"):
        saver.wait()
    assert list_checkpoints(tmp_path) == []
    monkeypatch.undo()
    saver.start(one, 1, {})
    saver.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_a_folder_left_by_a_step_that_was_never_committed_is_replaced(
    folder: Path, tmp_path: Path
) -> None:
    one = learner(folder / "model")
    saved(one, tmp_path, 1, who="killed")
    step(one, 1)
    saved(one, tmp_path, 1, who="again")
    assert load_checkpoint(learner(folder / "model"), tmp_path / "step-00000001") == {
        "who": "again"
    }


# Another number of ranks


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """What two ranks did; they loaded what one had saved."""
    one = learner(folder / "model")
    seed_all(0)
    step(one, 1)
    saved(one, folder / "by-one", 1, who="one")
    run_on_ranks(checkpoint_ranks.main, 2, folder)
    found: list[dict[str, Any]] = torch.load(folder / "two.pt", weights_only=False)
    return found


def test_one_rank_loads_what_two_have_saved(folder: Path, two: list[dict[str, Any]]) -> None:
    where = folder / "by-two" / "step-00000001"
    assert {file.name for file in where.iterdir()} == {
        "__0_0.distcp", "__1_0.distcp", ".metadata", "counters.json"
    }  # fmt: skip
    assert set(json.loads((where / "counters.json").read_text())["files"]) == {
        "__0_0.distcp", "__1_0.distcp", ".metadata"
    }  # fmt: skip
    one = learner(folder / "other")
    assert load_checkpoint(one, where) == {"who": "two"}
    assert drawn() == two[0]["drawn"], "rank 0's random numbers are rank 0's"
    assert two[0]["drawn"] != two[1]["drawn"]
    metrics = step(one, 2)
    assert metrics["loss"] == pytest.approx(two[0]["next"]["loss"], rel=1e-5)
    for name, tensor in weights(one).items():
        assert torch.allclose(tensor, two[0]["weights"][name], atol=1e-5), name


def test_two_ranks_load_what_one_has_saved(folder: Path, two: list[dict[str, Any]]) -> None:
    one = learner(folder / "other")
    load_checkpoint(one, folder / "by-one" / "step-00000001")
    for rank in two:
        assert rank["counters"] == {"who": "one"}
        assert equal(rank["loaded"], weights(one))
    assert two[0]["drawn_of_one"] == drawn()


def test_each_rank_goes_on_with_random_numbers_of_its_own(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["drawn_again"] == rank["drawn"]
    assert two[0]["drawn"] != two[1]["drawn"]

"""What machine there is, or is described, and what its children see of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.trainer.prepared_run import save_smallest_model
from tracegrad.private_files import private_folder
from tracegrad_trainer.cli.app import app
from tracegrad_trainer.cli.placement import placement_lines
from tracegrad_trainer.cli.serve import plan_placement
from tracegrad_trainer.config.gpus import GpuSettings
from tracegrad_trainer.config.loading import load_settings, parse_resolved
from tracegrad_trainer.config.trainer import LONGEST_SHARED_STEP_S, TrainerSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.launch import resolve_gpus
from tracegrad_trainer.launch.machine import (
    GIB,
    Gpu,
    Machine,
    allocator_environment,
    describe_machine,
    device_environment,
)
from tracegrad_trainer.launch.resolve_gpus import plan_serve, with_placement, with_training_gpus
from tracegrad_trainer.launch.session import StartError, write_resolved_settings
from tracegrad_trainer.launch.torchrun import RankProcesses


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerSettings:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    save_smallest_model(tmp_path / "model")
    sets = [f"model={tmp_path / 'model'}", f"state_dir={tmp_path / 's'}", "vllm.device=cuda"]
    return load_settings(None, sets)


def test_a_machine_is_described_by_its_gpus() -> None:
    found = describe_machine("8x80GiB")
    assert len(found.gpus) == 8
    assert {gpu.free for gpu in found.gpus} == {80 * GIB}
    assert describe_machine("2 x 23.5gib, 64GiB").host == 64 * GIB


@pytest.mark.parametrize("text", ["", "80GiB", "8x80", "8x80GB", "0x80GiB", "8x0GiB", "8x80GiB,"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"8x80GiB|can be planned"):
        describe_machine(text)


def test_children_see_their_gpus_within_those_that_we_were_given() -> None:
    seen = device_environment([1, 2], {})
    assert seen == {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,7", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert device_environment([0, 2], given) == {
        "CUDA_VISIBLE_DEVICES": "GPU-a,7",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    }
    with pytest.raises(ValueError, match="GPU 3 is not among the 3 of CUDA_VISIBLE_DEVICES"):
        device_environment([3], given)


def test_a_plan_reaches_vllm_the_ranks_and_the_file(settings: TrainerSettings) -> None:
    placement = plan_serve(settings, describe_machine("4x24GiB"))
    placed = with_placement(settings, placement)
    assert (placed.gpus.vllm, placed.gpus.train, placed.gpus.share) == ("0-2", "3", False)
    vllm = VllmProcess(placed.vllm, placed.gpus.vllm_gpus)
    assert vllm.env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    words = " ".join(vllm.command)
    assert "--tensor-parallel-size 1 --data-parallel-size 3 --gpu-memory-utilization 0." in words
    assert f"--kv-cache-memory-bytes {placement.kv_cache_bytes}" in words
    assert "--max-num-seqs 256" in words
    private_folder(placed.state_dir / "run")
    file = write_resolved_settings(placed)
    ranks = RankProcesses(placed, file)
    # Its own first; it shares memory with vLLM's.
    assert placed.push.transport == "ipc"
    assert ranks.env["CUDA_VISIBLE_DEVICES"] == "3,0,1,2"
    read = json.loads(file.read_text())
    assert read["gpus"] | {"vllm": "0-2", "train": "3", "share": False} == read["gpus"]
    assert read["vllm"]["data_parallel"] == 3


@pytest.mark.parametrize("gpus", ["1x24GiB", "2x24GiB", "3x80GiB", "8x80GiB"])
def test_stored_settings_are_read_and_planned_again(settings: TrainerSettings, gpus: str) -> None:
    # What is stored is resolved here, where there is no GPU.
    on_gpus = settings.fsdp.model_copy(update={"compute_dtype": "bfloat16"})
    settings = settings.with_changes(fsdp=on_gpus)
    placed = with_placement(settings, plan_serve(settings, describe_machine(gpus)))
    read = TrainerSettings.model_validate(placed.stored())
    assert (read.gpus, read.vllm, read.ranks) == (placed.gpus, placed.vllm, placed.ranks)
    # What was chosen is what is given now.
    again = with_placement(read, plan_serve(read, describe_machine(gpus)))
    assert (again.gpus, again.vllm, again.ranks) == (placed.gpus, placed.vllm, placed.ranks)


def test_a_vllm_for_gpus_does_not_start_without_one(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself would say so after a minute, in a traceback."""
    monkeypatch.setattr(resolve_gpus, "read_gpus", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartError, match=r"vllm.device: .* \(CUDA_VISIBLE_DEVICES = ''\)"):
        plan_placement(settings)
    on_cpu = settings.vllm.model_copy(update={"device": "cpu"})
    assert plan_placement(settings.with_changes(vllm=on_cpu)).gpus == ()


def test_ranks_follow_from_the_gpus(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_training_gpus(settings) == settings  # no GPU here, and none is named
    four = tuple(Gpu(i, "fake", 24 * GIB, 24 * GIB) for i in range(4))
    monkeypatch.setattr(resolve_gpus, "read_gpus", lambda: four)
    found = with_training_gpus(settings)
    assert (found.ranks, found.gpus.train) == (4, "0-3")
    shared = with_placement(settings, plan_serve(settings, Machine(four[:1], 64 * GIB)))
    assert (shared.ranks, shared.gpus.share, shared.gpus.vllm) == (1, True, "0")
    # What follows from sharing follows from a choice too, and ranks read the same.
    for read in (shared, parse_resolved(shared.model_dump_json())):
        assert read.vllm.sleep_mode
        assert read.proxy.read_timeout_s == read.proxy.max_wait_s == LONGEST_SHARED_STEP_S


def dry_run(settings: TrainerSettings, *words: str) -> tuple[int, str]:
    sets = [f"--set=model={settings.model}", f"--set=state_dir={settings.state_dir}"]
    ended = CliRunner().invoke(app, ["serve", *sets, *words], env={"COLUMNS": "400"})
    return ended.exit_code, ended.output


def test_a_dry_run_says_who_is_where_and_why(settings: TrainerSettings) -> None:
    code, text = dry_run(settings, "--dry-run", "--gpus", "2x24GiB")
    assert code == 0, text
    assert "placement: vLLM on GPU 0, 1 rank on GPU 1" in text
    for words in (
        "served weights",
        "KV cache",
        "gathered",
        "files of a weight push",
        "- apart",
        "precision: trains in bfloat16",
    ):
        assert words in text
    code, text = dry_run(settings, "--dry-run", "--gpus", "1x24GiB", "--json")
    found = json.loads(text)
    assert found["settings"]["fsdp"]["compute_dtype"] == "bfloat16"  # as it is there, not here
    assert found["placement"]["shared"] is found["settings"]["gpus"]["share"] is True
    assert dry_run(settings, "--dry-run", "--gpus", "many")[0] == 2
    assert dry_run(settings, "--gpus", "2x24GiB")[0] == 2


def test_a_start_says_why_and_which_gpus_it_left_out(settings: TrainerSettings) -> None:
    gpus = [Gpu(i, "fake", 24 * GIB, free * GIB) for i, free in enumerate((3, 24, 24))]
    lines = placement_lines(plan_serve(settings, Machine(tuple(gpus), 64 * GIB)))
    assert lines[0] == "placement: vLLM on GPU 1, 1 rank on GPU 2"
    assert lines[1].startswith("- apart, so that both work at once: 1 of 3 GPUs trains")
    assert any(line.startswith("- GPU 0 is left out: others hold 21.0 GiB") for line in lines)
    on_cpu = plan_serve(settings, Machine((), 64 * GIB))
    assert placement_lines(on_cpu) == ["placement: vLLM on the CPU, 1 rank on the CPU"]


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_a_machine_that_is_described_takes_what_this_one_would_not(
    settings: TrainerSettings, transport: str
) -> None:
    """A push from GPU to GPU, where a CPU build of vLLM is installed."""
    asked = f"--set=push.transport={transport}"
    found = dry_run(settings, "--dry-run", "--gpus", "2x24GiB", asked)
    assert found[0] == 0, found[1]
    assert f"weights are pushed by {transport}" in found[1]
    made = settings.with_changes(push=settings.push.model_copy(update={"transport": transport}))
    with pytest.raises(ValueError, match="from GPU to GPU, and vLLM serves on a CPU"):
        plan_serve(made, Machine((), 64 * GIB))


def test_gpus_that_are_used_alike_are_one_row(settings: TrainerSettings) -> None:
    text = dry_run(settings, "--dry-run", "--gpus", "8x24GiB")[1]
    rows = [line.split("  ")[:2] for line in text.splitlines() if "(described" in line]
    assert rows == [
        ["0-5 (described, 24.0 GiB)", "vLLM"],
        ["6-7 (described, 24.0 GiB)", "ranks 0-1"],
    ]
    text = dry_run(settings, "--dry-run", "--gpus", "2x24GiB", "--set=gpus.share=true")[1]
    rows = [line.split("  ")[:2] for line in text.splitlines() if "(described" in line]
    both = "0-1 (described, 24.0 GiB)"
    assert rows == [[both, "vLLM serves"], [both, "ranks 0-1 train"]]


@pytest.mark.parametrize(("given", "text"), [(0, "0"), ([0, 2], "0,2"), ("0-2", "0-2")])
def test_gpus_are_named_by_number_too(given: object, text: str) -> None:
    """As `--set gpus.vllm=0` and TOML have them."""
    assert GpuSettings.model_validate({"vllm": given}).vllm == text


@pytest.mark.parametrize("given", [True, -1, [], [0, 0], [0, "1"], 1.5, "3-1"])
def test_what_is_no_list_of_gpus_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="vllm"):
        GpuSettings.model_validate({"vllm": given})


def test_a_dry_run_refuses_what_would_not_start(settings: TrainerSettings) -> None:
    words = ["--set=vllm.quantization=fp8", "--set=objective.correction=none"]
    code, text = dry_run(settings, "--dry-run", "--gpus", "2x24GiB", *words)
    assert code == 2
    assert "vllm serves in fp8" in text


def test_a_machine_without_gpus_is_planned_too(settings: TrainerSettings) -> None:
    code, text = dry_run(settings, "--dry-run", "--set=vllm.device=cpu", "--set=fsdp.device=cpu")
    assert code == 0, text
    assert "placement: vLLM on the CPU, 1 rank on the CPU" in text
    assert "served weights" in text


def test_ranks_whose_memory_vllm_opens_have_no_segments_that_grow() -> None:
    """Other options of the user's stay."""
    name, others = "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,garbage_collection_threshold:.8"
    assert allocator_environment({name: f"expandable_segments:True,{others}"}) == {name: others}
    assert allocator_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == {
        "PYTORCH_ALLOC_CONF": ""
    }
    assert allocator_environment({name: others}) == {}

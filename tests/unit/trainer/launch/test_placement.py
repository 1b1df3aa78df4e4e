"""Where vLLM and the ranks are placed: a table of models and machines, and what always holds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tracegrad_trainer.cli.serve import ready_timeout_s
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch import placement
from tracegrad_trainer.launch.machine import GIB, Gpu, Machine
from tracegrad_trainer.launch.model_sizes import model_sizes, placement_request
from tracegrad_trainer.launch.placement import (
    DoesNotFitError,
    ModelSizes,
    PlacementRequest,
    RankMemory,
    place,
    place_training,
)
from tracegrad_trainer.launch.resolve_gpus import with_placement

CONFIGS: dict[str, Any] = {
    "0.6B": (Qwen3Config, (1024, 3072, 28, 16, 8, 151_936, True)),
    "1.7B": (Qwen3Config, (2048, 6144, 28, 16, 8, 151_936, True)),
    "8B": (Qwen3Config, (4096, 12_288, 36, 32, 8, 151_936, False)),
    "32B": (Qwen3Config, (5120, 25_600, 64, 64, 8, 151_936, False)),
    "70B": (LlamaConfig, (8192, 28_672, 80, 64, 8, 128_256, False)),
    "235B-A22B": (Qwen3MoeConfig, (4096, 12_288, 94, 64, 4, 151_936, False)),
}
# What is open while they train: half precision, blocks recomputed, 16k tokens a call.
SETS = (
    "vllm.device=cuda",
    "vllm.max_model_len=16384",
    "fsdp.compute_dtype=bfloat16",
    "fsdp.gradient_checkpointing=true",
)


def meta(name: str) -> torch.nn.Module:
    kind, (hidden, inner, layers, heads, kv_heads, vocabulary, tied) = CONFIGS[name]
    changes: dict[str, Any] = {}
    if name == "235B-A22B":
        changes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    config = kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
        **changes,
    )
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (made / name).write_text("{}")
    return made


def settings_of(folder: Path, *sets: str) -> TrainerSettings:
    return load_settings(None, [f"model={folder}", f"state_dir={folder}/state", *SETS, *sets])


@cache
def sizes_of(folder: Path, name: str, lora: bool) -> ModelSizes:
    settings = settings_of(folder, *(["fsdp.lora.rank=32"] if lora else []))
    return model_sizes(meta(name), settings, gpus=8)


def machine(count: int, gib: float, host: int = 4096) -> Machine:
    total = int(gib * GIB)
    return Machine(tuple(Gpu(i, "fake", total, total) for i in range(count)), host * GIB)


def plan(sizes: ModelSizes, of: Machine, **request: Any) -> placement.Placement:
    return place(of, sizes, PlacementRequest(**request))


def words(sizes: ModelSizes, of: Machine) -> str:
    """`6+2 tp1`: six GPUs serve and two train; `8 shared tp8`; `no`."""
    try:
        found = plan(sizes, of)
    except DoesNotFitError:
        return "no"
    serving, training = len(found.engine_gpus), len(found.train_gpus)
    if found.shared:
        return f"{training} shared tp{found.tensor_parallel}"
    return f"{serving}+{training} tp{found.tensor_parallel}"


# By (model, LoRA, GiB of a GPU): on 1, 2, 4, 8 GPUs.
ALIKE = "1 shared tp1", "1+1 tp1", "3+1 tp1", "6+2 tp1"
NOWHERE = "no", "no", "no", "no"
TABLE = {
    ("0.6B", False, 24): ALIKE,
    ("0.6B", False, 80): ALIKE,
    ("0.6B", True, 141): ALIKE,
    ("1.7B", False, 24): ("no", "2 shared tp2", "2+2 tp1", "6+2 tp1"),
    ("1.7B", False, 80): ALIKE,
    ("1.7B", True, 24): ALIKE,
    ("8B", False, 24): NOWHERE,
    ("8B", False, 80): ("no", "2 shared tp2", "2+2 tp1", "6+2 tp1"),
    ("8B", False, 141): ("no", *ALIKE[1:]),
    ("8B", True, 24): ("no", "no", "2+2 tp2", "6+2 tp2"),
    ("8B", True, 80): ALIKE,
    ("32B", False, 80): NOWHERE,
    ("32B", False, 141): ("no", "no", "no", "3+5 tp1"),
    ("32B", True, 80): ("no", "no", "2+2 tp2", "6+2 tp2"),
    ("70B", False, 141): NOWHERE,
    ("70B", True, 80): ("no", "no", "no", "4+4 tp4"),
    ("70B", True, 141): ("no", "no", "2+2 tp2", "6+2 tp2"),
    ("235B-A22B", False, 141): NOWHERE,
    ("235B-A22B", True, 80): NOWHERE,
    ("235B-A22B", True, 141): ("no", "no", "no", "4+4 tp4"),
}


@pytest.mark.parametrize(("case", "expected"), TABLE.items(), ids=str)
def test_models_on_machines(
    folder: Path, case: tuple[str, bool, int], expected: tuple[str, ...]
) -> None:
    name, lora, gib = case
    sizes = sizes_of(folder, name, lora)
    assert tuple(words(sizes, machine(count, gib)) for count in (1, 2, 4, 8)) == expected


@pytest.mark.parametrize("case", [key for key in TABLE if key[1:] in ((False, 80), (True, 80))])
def test_buffers_of_a_push_change_nobodys_place(folder: Path, case: tuple[str, bool, int]) -> None:
    """Where there is no room for them beside a useful cache a push goes by files."""
    name, lora, gib = case
    sizes = sizes_of(folder, name, lora)
    for count in (1, 2, 4, 8):
        of = machine(count, gib)
        with suppress(DoesNotFitError):
            files = plan(sizes, of)
            shared = plan(sizes, of, transport="ipc", transport_asked=False)
            assert (shared.engine_gpus, shared.train_gpus) == (files.engine_gpus, files.train_gpus)
            assert shared.shared == files.shared
            if shared.transport == "files":
                assert shared.gpus == files.gpus


def test_a_push_between_gpus_has_its_buffers_planned(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", False)
    assert sizes.largest == 2 * 151_936 * 4096, "the embedding, as it is served"
    files = plan(sizes, machine(8, 80))
    shared = plan(sizes, machine(8, 80), transport="ipc", transport_asked=False)
    assert (files.transport, shared.transport) == ("files", "ipc")
    # A context of rank 0 and a bucket; the worker's copy of it, and the layer that it makes of it.
    wanted = GIB + 3 * sizes.largest
    for before, after in zip(files.gpus[:6], shared.gpus[:6], strict=True):
        assert after.serving["a push's buffers"] == wanted
        assert before.serving["KV cache"] - after.serving["KV cache"] == wanted
    assert files.gpus[6:] == shared.gpus[6:], "those that train"
    assert any(r.startswith("weights are pushed by ipc (in GPU memory") for r in shared.reasons)
    # With one GPU the rank has a context there, and nothing gathered while it pushes.
    one = plan(sizes_of(folder, "0.6B", False), machine(1, 80), transport="ipc")
    assert (one.shared, one.transport) == (True, "ipc")
    assert "a push's buffers" not in one.gpus[0].serving


def test_a_push_into_a_mixture_has_room_for_the_experts_of_a_block(folder: Path) -> None:
    """A worker holds them whole until all have come, and then its part of them."""
    sizes, eight = sizes_of(folder, "235B-A22B", True), machine(8, 141)
    assert sizes.experts == 2 * 128 * 3 * 4096 * 1536
    assert sizes_of(folder, "8B", True).experts == 0
    found = plan(sizes, eight, transport="ipc", transport_asked=False)
    assert (found.transport, found.tensor_parallel) == ("ipc", 4)
    assert found.gpus[0].serving["a push's buffers"] == (
        GIB + sizes.largest + sizes.experts + sizes.experts // 4
    )
    found = plan(sizes, eight, transport="nccl")
    assert found.gpus[0].serving["a push's buffers"] == sizes.experts + sizes.experts // 4
    wide = replace(sizes, experts=40 * GIB)
    found = plan(wide, eight, transport="ipc", transport_asked=False)
    assert (found.transport, found.tensor_parallel) == ("files", 4)


def test_a_push_goes_by_files_where_its_buffers_have_no_room(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", True)
    wide = replace(sizes, largest=40 * GIB)
    found = plan(wide, machine(8, 80), transport="ipc", transport_asked=False)
    assert found.transport == "files"
    with pytest.raises(DoesNotFitError):
        plan(wide, machine(8, 80), transport="ipc", share=False)


def test_the_settings_say_how_a_push_goes(folder: Path) -> None:
    settings = settings_of(folder)
    request = placement_request(settings, gpus=8)
    assert (request.transport, request.transport_asked) == ("ipc", False)
    found = place(machine(8, 80), sizes_of(folder, "8B", False), request)
    assert with_placement(settings, found).push.transport == "ipc"
    request = placement_request(settings_of(folder, "push.transport=files"), gpus=8)
    assert (request.transport, request.transport_asked) == ("files", True)
    assert placement_request(settings_of(folder, "vllm.device=cpu"), gpus=8).transport == "files"


def test_sizes_are_those_of_the_shapes(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", False)
    assert sizes.served == 2 * sizes.parameters
    assert sizes.kv_bytes == 2 * 2 * 36 * 8 * 128  # keys and values, two bytes, layers, heads
    assert (sizes.heads, sizes.kv_heads, sizes.max_model_len) == (32, 8, 16_384)
    # Weight, gradient and two moments in float32.
    assert sizes.ranks[4].state == 16 * sizes.parameters // 4
    assert sizes_of(folder, "8B", True).ranks[4].state < sizes.ranks[4].state / 6


def test_a_model_that_does_not_fit_is_refused_with_figures_and_what_would(folder: Path) -> None:
    with pytest.raises(DoesNotFitError) as error:
        plan(sizes_of(folder, "70B", False), machine(8, 80))
    line = str(error.value)
    # Of those that are apart whoever came furthest: vLLM had room, with fewer ranks.
    assert "apart, a rank of 4 needs" in line
    assert line.startswith("model: 70.55e9 parameters do not fit on 8 GPUs with 80.0 GiB free each")
    assert "beside 106.7 GiB of training state, and has 76.0 GiB" in line
    assert line.endswith("It would fit with [fsdp.lora], or with fsdp.cpu_offload = true")
    with pytest.raises(DoesNotFitError, match=r"with \[fsdp.lora\] and fsdp.cpu_offload = true$"):
        plan(sizes_of(folder, "235B-A22B", False), machine(8, 80))
    with pytest.raises(DoesNotFitError, match="of the host's memory"):
        plan(sizes_of(folder, "8B", False), machine(8, 80, host=64))


def test_weights_and_cache_in_8_bits_take_half(folder: Path) -> None:
    half, exact = (
        model_sizes(meta("8B"), settings_of(folder, *sets), gpus=8)
        for sets in (["vllm.quantization=fp8", 'vllm.extra_args=["--kv-cache-dtype=fp8"]'], [])
    )
    embedded = 2 * 151_936 * 4096  # and the head: vLLM leaves both in bfloat16
    vectors = 36 * (2 * 4096 + 2 * 128) + 4096  # norms
    assert half.served == half.parameters + embedded + vectors
    assert exact.served == 2 * exact.parameters
    assert (half.kv_bytes, half.pushed) == (exact.kv_bytes // 2, exact.pushed)


def test_a_push_is_checked_beside_a_vllm_that_serves(folder: Path) -> None:
    """The forward of the check gathers weights on a GPU that vLLM has taken back; gradients are
    gone by then."""
    sizes = sizes_of(folder, "8B", False)
    found = plan(sizes, machine(2, 80))
    rank = sizes.ranks[2]
    assert found.shared
    for each in found.gpus:
        assert each.serving["gathered"] == each.training["gathered"] == rank.gathered
        assert each.serving["state without gradients"] == rank.state * 3 // 4


def test_one_gpu_of_a_copy_has_all_logits(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", True)
    apart = [plan(sizes, machine(8, 80), tensor_parallel=n).gpus[0].serving for n in (1, 4)]
    assert len({parts["vLLM's working memory"] for parts in apart}) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "fit"),
    [
        (32, 8, 12_288, [1, 2, 4, 8]),
        (40, 10, 17_920, [1, 2]),  # 4 divides the heads, and not those of keys and values
        (64, 4, 1536, [1, 2, 4, 8]),  # two GPUs keep each of four
        (28, 4, 18_944, [1, 2, 4]),
        (32, 8, 11_010, [1, 2]),
    ],
)
def test_copies_are_of_sizes_that_vllm_can_divide(
    folder: Path, heads: int, kv_heads: int, inner: int, fit: list[int]
) -> None:
    shapes = {"heads": heads, "kv_heads": kv_heads, "inner": inner}
    sizes = replace(sizes_of(folder, "8B", True), served=100 * GIB, **shapes)
    for size in (1, 2, 3, 4, 8):
        if size in fit:
            assert plan(sizes, machine(16, 200), tensor_parallel=size).tensor_parallel == size
        else:
            with pytest.raises(ValueError, match=f"vllm.tensor_parallel = {size} does not divide"):
                plan(sizes, machine(16, 200), tensor_parallel=size)
    with suppress(DoesNotFitError):
        assert plan(sizes, machine(8, 40)).tensor_parallel in fit


def test_more_gpus_than_there_are_is_no_question_of_memory(folder: Path) -> None:
    sizes = sizes_of(folder, "0.6B", False)
    with pytest.raises(ValueError, match=r"tensor_parallel = 4: 4 GPUs are needed, .* has 2"):
        plan(sizes, machine(2, 80), tensor_parallel=4)
    line = "tensor_parallel = 2 and vllm.data_parallel = 2: 4 GPUs are needed, and gpus.vllm names"
    with pytest.raises(ValueError, match=line):
        plan(sizes, machine(8, 80), tensor_parallel=2, data_parallel=2, vllm=(0, 1))


def test_gpus_that_others_use_are_left_out(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", True)
    gpus = list(machine(4, 80).gpus)
    gpus[0] = replace(gpus[0], free=30 * GIB)
    of = Machine(tuple(gpus), 4096 * GIB)
    found = plan(sizes, of)
    assert (found.engine_gpus, found.train_gpus) == ((1, 2), (3,))
    assert any(
        "GPU 0 is left out: others hold 50.0 GiB of its 80.0 GiB" in r for r in found.reasons
    )
    assert place_training(of, PlacementRequest()) == (1, 2, 3)
    # Asked for by name or number they are taken.
    assert place_training(of, PlacementRequest(ranks=4)) == (0, 1, 2, 3)
    assert plan(replace(sizes, kv_bytes=1), of, vllm=(0,)).engine_gpus == (0,)


def test_vllm_starts_on_gpus_of_different_size(folder: Path) -> None:
    """It compares its share of each GPU with what is free there, less its own context."""
    rank = RankMemory(state=1, gathered=1, activations=1, host=1)
    sizes = replace(sizes_of(folder, "0.6B", False), ranks={1: rank})
    for total, free in (((24, 24, 80), (24, 24, 30)), ((8, 8, 8), (8, 8, 8))):
        gpus = tuple(Gpu(i, "fake", total[i] * GIB, free[i] * GIB) for i in range(3))
        small = replace(sizes, kv_bytes=1000)
        found = plan(small, Machine(gpus, 4096 * GIB), vllm=(0, 2), train=(1,))
        assert found.gpu_memory_utilization is not None
        for gpu in (gpus[0], gpus[2]):
            assert found.gpu_memory_utilization * gpu.total <= gpu.free - GIB


def test_what_sleeps_in_the_hosts_memory_is_planned(folder: Path) -> None:
    sizes, one = sizes_of(folder, "0.6B", False), machine(1, 80)
    hosts = [plan(sizes, one, sleep_level=level).host for level in (1, 2)]
    assert hosts[0]["a sleeping vLLM"] - hosts[1]["a sleeping vLLM"] == 2 * sizes.served
    assert hosts[1]["a sleeping vLLM"] > 0  # its graphs' memory
    assert "a sleeping vLLM" not in plan(sizes, machine(2, 80)).host


def test_vllm_sleeps_as_lightly_as_the_hosts_memory_allows(folder: Path) -> None:
    """At level 2 it loses what no push brings back."""
    sizes, large, apart = sizes_of(folder, "1.7B", True), machine(1, 80), machine(2, 80)
    level_2 = sum(plan(sizes, large, sleep_level=2).host.values()) // GIB + 1
    small = machine(1, 80, host=level_2)
    found = plan(sizes, large, sleep_level_asked=False)
    assert (found.sleep_level, found.transport) == (1, "files")
    assert any("sleeps at level 1: what it has loaded waits" in line for line in found.reasons)
    assert plan(sizes, apart, sleep_level_asked=False).sleep_level is None
    found = plan(sizes, small, sleep_level_asked=False)
    assert found.sleep_level == 2
    assert any("sleeps at level 2: the host's memory does" in line for line in found.reasons)
    for model, asked in ((sizes, True), (replace(sizes, beside=1), False)):
        with pytest.raises(DoesNotFitError, match=r"would fit with.* gpus\.sleep_level = 2"):
            plan(model, small, sleep_level_asked=asked)
    settings = settings_of(folder, "fsdp.lora.rank=32")
    assert with_placement(settings, found).gpus.sleep_level == 2


@pytest.mark.parametrize(
    ("sets", "level", "asked"),
    [
        ((), 1, False),
        (("vllm.reasoning_parser=qwen3",), 1, True),
        (("gpus.sleep_level=1",), 1, True),
        (("gpus.sleep_level=2", "vllm.reasoning_parser=qwen3"), 2, True),
    ],
)
def test_which_sleep_is_asked_for(
    folder: Path, sets: tuple[str, ...], level: int, asked: bool
) -> None:
    request = placement_request(settings_of(folder, *sets), gpus=1)
    assert (request.sleep_level, request.sleep_level_asked) == (level, asked)


def test_files_of_a_push_may_be_on_a_disk(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", True)
    with pytest.raises(DoesNotFitError, match=r"It would fit with push.folder on a disk$"):
        plan(sizes, machine(2, 80, host=24))
    sets = ["fsdp.lora.rank=32", f"push.folder={folder}"]
    on_disk = model_sizes(meta("8B"), settings_of(folder, *sets), gpus=2)
    found = plan(on_disk, machine(2, 80, host=24))
    assert found.pushed == sizes.pushed


def test_ranks_that_share_rows_come_in_their_number(folder: Path) -> None:
    """fsdp.context_parallel, fsdp.replicas: another number would be refused after the plan."""
    sets = ["fsdp.context_parallel=4", "fsdp.replicas=2"]
    assert placement_request(settings_of(folder, *sets), gpus=8).rank_multiple == 4
    sizes = sizes_of(folder, "8B", True)
    for count, parallel, trains in ((8, 4, 4), (8, 2, 2), (6, 2, 2), (5, 2, 2), (7, 3, 3)):
        found = plan(sizes, machine(count, 80), rank_multiple=parallel)
        assert (found.ranks, found.shared) == (trains, False)
    found = plan(sizes, machine(3, 80), rank_multiple=2, share=True)
    assert (found.ranks, found.shared) == (2, True)
    # Of three GPUs that no copy of four can use two train.
    found = plan(sizes, machine(9, 80), rank_multiple=2, tensor_parallel=4)
    assert (len(found.engine_gpus), found.ranks) == (4, 4)
    assert place_training(machine(5, 80), PlacementRequest(rank_multiple=2)) == (0, 1, 2, 3)
    found = plan(sizes, machine(5, 80), rank_multiple=4, engine_on_gpu=False)
    assert found.train_gpus == (0, 1, 2, 3)


def test_large_models_have_longer_to_start(folder: Path) -> None:
    """By what a disk that reads 100 MiB a second needs for them."""
    small = plan(sizes_of(folder, "0.6B", False), machine(8, 141))
    large = plan(sizes_of(folder, "235B-A22B", True), machine(8, 141))
    assert 900 < ready_timeout_s(small) < 920
    assert 5000 < ready_timeout_s(large) < 6000


def test_settings_that_are_in_the_way_are_named(folder: Path) -> None:
    sizes = sizes_of(folder, "8B", True)
    for name, fixed in (
        ("vllm.gpu_memory_utilization", {"gpu_memory_utilization": 0.99}),
        ("vllm.kv_cache_memory_bytes", {"kv_cache_bytes": 1 << 20}),
        ("ranks", {"ranks": 3, "tensor_parallel": 2}),
    ):
        with pytest.raises(DoesNotFitError, match=f"It would fit .*without {name}"):
            plan(sizes, machine(4, 80), **fixed)
    with pytest.raises(DoesNotFitError, match=r"take a host with more memory$"):
        plan(sizes, machine(4, 80, host=1))


def test_what_has_no_gpu_is_in_the_hosts_memory(folder: Path) -> None:
    sizes, four = sizes_of(folder, "0.6B", False), machine(4, 80)
    found = plan(sizes, four, engine_on_gpu=False, kv_cache_bytes=1 << 28)
    assert (found.train_gpus, found.engine_gpus) == ((0, 1, 2, 3), ())
    assert found.host["served weights"] == sizes.served
    found = plan(sizes, four, train_on_gpu=False, ranks=2)
    assert (found.train_gpus, len(found.engine_gpus), found.ranks) == ((), 4, 2)
    assert found.host["state"] == 2 * sizes.ranks[2].state
    assert found.reasons[0] == "the ranks are on the CPU: fsdp.device says so"


@pytest.mark.parametrize("option", ["--tensor_parallel_size=2", "-pp", "--max-model-len=512"])
def test_what_is_planned_is_no_extra_argument(folder: Path, option: str) -> None:
    settings = settings_of(folder, f'vllm.extra_args=["{option}"]')
    with pytest.raises(ValueError, match=rf"vllm.extra_args: .*{option}"):
        placement_request(settings, gpus=2)


def test_what_the_settings_name_is_kept(folder: Path) -> None:
    sizes, eight = sizes_of(folder, "1.7B", False), machine(8, 80)
    found = plan(sizes, eight, vllm=(0, 1, 2, 3, 4, 5), train=(6, 7), tensor_parallel=2)
    assert found.engines == ((0, 1), (2, 3), (4, 5))
    assert (found.train_gpus, found.ranks, found.data_parallel) == ((6, 7), 2, 3)
    found = plan(sizes, eight, train=(0, 1))
    assert found.engine_gpus == (2, 3, 4, 5, 6, 7)
    found = plan(sizes, eight, ranks=4)
    assert (found.engine_gpus, found.train_gpus) == ((0, 1, 2, 3), (4, 5, 6, 7))
    found = plan(sizes, eight, share=True, vllm=(2, 3))
    assert (found.shared, found.engine_gpus, found.train_gpus) == (True, (2, 3), (2, 3))
    found = plan(sizes, eight, kv_cache_bytes=20 * GIB)
    assert found.kv_cache_bytes == 20 * GIB
    found = plan(sizes, eight, gpu_memory_utilization=0.5)
    assert found.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("gpus", "request_", "line"),
    [
        (2, {"ranks": 4}, "ranks = 4: this machine has 2 GPUs"),
        (8, {"ranks": 4, "train": (6, 7)}, "ranks = 4, but gpus.train = '6-7' names 2"),
        (4, {"vllm": (0, 5)}, "gpus.vllm: GPU 5 is not there: this machine has 4"),
        (0, {"vllm": (0,)}, "gpus.vllm: this machine has no GPU"),
        (0, {"share": True}, "gpus.share: this machine has no GPU"),
        (2, {"train": (0,), "train_on_gpu": False}, "gpus.train: fsdp.device puts it on the CPU"),
        (2, {"rank_multiple": 4}, "fsdp.replicas: .* a multiple of 4, .* this machine has 2"),
        (1, {"share": False}, r"\[gpus\] leaves no way to lay it out"),
    ],
)
def test_contradictions_are_one_line(
    folder: Path, gpus: int, request_: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line) as error:
        plan(sizes_of(folder, "0.6B", False), machine(gpus, 80), **request_)
    assert "\n" not in str(error.value)


ranks_memory = st.builds(
    lambda state, gathered, activations, offloaded: {
        n: RankMemory(
            state=state // n,
            gathered=gathered,
            activations=activations,
            host=state // n,
            offloaded=offloaded,
        )
        for n in range(1, 9)
    },
    st.integers(1, 1200 * GIB),
    st.integers(1, 10 * GIB),
    st.integers(1, 20 * GIB),
    st.booleans(),
)
any_sizes = st.builds(
    lambda served, kv, heads, longest, ranks: ModelSizes(
        parameters=served // 2,
        served=served,
        kv_bytes=kv,
        kv_heads=min(8, heads),
        heads=heads,
        vocabulary=32_000,
        max_model_len=longest,
        pushed=served,
        ranks=ranks,
        ways={},
    ),
    st.integers(1, 500 * GIB),
    st.integers(1_000, 400_000),
    st.sampled_from([8, 14, 16, 28, 32, 64]),
    st.sampled_from([2048, 16_384, 131_072]),
    ranks_memory,
)
any_request = st.builds(
    PlacementRequest,
    share=st.sampled_from([None, True, False]),
    ranks=st.sampled_from([None, 1, 2]),
    tensor_parallel=st.sampled_from([None, 1, 2]),
)


@given(
    any_sizes,
    any_request,
    st.lists(st.tuples(st.integers(8, 192), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_no_gpu_is_planned_for_more_than_is_free(
    sizes: ModelSizes, request_: PlacementRequest, gpus: list[tuple[int, float]]
) -> None:
    """Of different sizes, and with others on them."""
    made = [Gpu(i, "fake", n * GIB, int(n * GIB * free)) for i, (n, free) in enumerate(gpus)]
    try:
        found = place(Machine(tuple(made), 4096 * GIB), sizes, request_)
    except ValueError:
        return
    for each in found.gpus:
        if each.users:
            assert each.used <= each.gpu.free - placement.RESERVE * each.gpu.total + 1
    share = found.gpu_memory_utilization
    assert share is not None
    for n in found.engine_gpus:  # what vLLM asks of a GPU as it starts
        assert share * made[n].total <= made[n].free - GIB * 0.99


def test_training_alone_takes_all_gpus_or_those_that_are_named() -> None:
    eight = machine(8, 80)
    assert place_training(eight, PlacementRequest()) == tuple(range(8))
    assert place_training(eight, PlacementRequest(ranks=2)) == (0, 1)
    assert place_training(eight, PlacementRequest(train=(6, 7))) == (6, 7)
    assert place_training(machine(0, 1), PlacementRequest(ranks=2)) == ()
    with pytest.raises(ValueError, match="names 2"):
        place_training(eight, PlacementRequest(train=(6, 7), ranks=4))


def test_without_gpus_nothing_is_chosen(folder: Path) -> None:
    settings = settings_of(folder, "vllm.device=cpu", "ranks=2")
    sizes = model_sizes(meta("0.6B"), settings, gpus=0)
    assert sizes.served == 4 * sizes.parameters
    found = plan(sizes, machine(0, 1, host=1), ranks=2, kv_cache_bytes=1 << 28)
    assert (found.engine_gpus, found.train_gpus, found.ranks) == ((), (), 2)
    assert found.host["served weights"] == sizes.served


@given(any_sizes, any_request, st.integers(2, 8), st.integers(8, 192), st.integers(0, 100))
def test_what_always_holds(
    sizes: ModelSizes, request_: PlacementRequest, count: int, gib: int, more: int
) -> None:
    of = machine(count, gib)
    try:
        found = place(of, sizes, request_)
    except DoesNotFitError:
        return
    assert not set(found.engine_gpus) & set(found.train_gpus) or found.shared
    assert len(set(found.engine_gpus)) == len(found.engine_gpus)
    assert found.ranks == len(found.train_gpus)
    assert found.tensor_parallel * found.data_parallel == len(found.engine_gpus)
    assert sizes.heads % found.tensor_parallel == 0 or request_.tensor_parallel
    for each in found.gpus:
        assert each.used <= each.gpu.free - placement.RESERVE * each.gpu.total + 1
    assert found.gpu_memory_utilization is not None
    assert 0 < found.gpu_memory_utilization < 1
    # What fits, fits on larger GPUs, and serves no fewer copies there.
    larger = place(machine(count, gib + more), sizes, request_)
    if not found.shared:
        assert not larger.shared
        assert larger.data_parallel >= found.data_parallel

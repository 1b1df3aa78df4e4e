"""Models that do not fit, or do not belong to their tokenizer: said before weights are read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from support.trainer.learners import build
from support.trainer.row_samples import VOCABULARY, rows, tiny_model
from support.trainer.tiny_model import tiny_sizes
from support.trainer.tiny_models import logprobs, make
from tracegrad.host_memory import free_cgroup_memory, free_cgroup_v1_memory
from tracegrad_trainer.batches import micro_batch, pack
from tracegrad_trainer.engine.config import FsdpSettings, LoraSettings, OptimSettings
from tracegrad_trainer.engine.model import memory
from tracegrad_trainer.engine.model.hf_config import transformer_blocks
from tracegrad_trainer.engine.model.parallelize import build_model

CPU = FsdpSettings(device="cpu")
GIB = 1024**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("fits") / "model")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model of 8e9 parameters; there are no weights."""
    folder = tmp_path_factory.mktemp("large")
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def asked(folder: Path, settings: FsdpSettings = CPU, **changes: int) -> memory.MemoryEstimate:
    given = {"ranks": 1, "local_ranks": 1, "tokens": 4096} | changes
    return memory.check_fits_memory(folder, settings, **given)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_is_refused_with_its_figures(large: Path) -> None:
    with pytest.raises(ValueError, match=r"\(8\.19e9 parameters\) does not fit") as error:
        asked(large, free=64 * GIB)
    (line,) = str(error.value).splitlines()
    # 16 bytes a parameter: weight, gradient, two moments.
    assert "weights, gradients and optimizer 122.1 GiB" in line
    assert "and has 64.0 GiB" in line
    assert "fsdp.gradient_checkpointing = true" in line
    assert "batches.tokens_per_micro_batch" in line


def test_what_fits_is_said_with_its_figures(large: Path) -> None:
    found = asked(large, FsdpSettings(device="cpu", gradient_checkpointing=True), free=250 * GIB)
    assert found.state == 16 * found.parameters
    assert found.copied == 12 * found.parameters
    # One rank gathers too: the embeddings, the head and two of the 36 blocks, in float32.
    root = 2 * 151_936 * 4096 + 4096
    assert found.whole == 4 * (root + 2 * (found.parameters - root) // 36)
    assert 0 < found.activations < 10 * GIB


def test_ranks_share_weights_but_not_activations(large: Path) -> None:
    one, four = (asked(large, ranks=ranks, free=2**60) for ranks in (1, 4))
    assert four.state == one.state // 4
    assert four.activations == one.activations
    # The embeddings and the head, and two of the 36 blocks.
    assert 0 < four.whole < 4 * one.parameters / 4


@pytest.mark.parametrize(
    ("changes", "smaller"),
    [
        ({"gradient_checkpointing": True}, lambda e: e.activations),
        ({"compute_dtype": "bfloat16"}, lambda e: e.activations),
        ({"lora": LoraSettings()}, lambda e: e.state),
        ({"cpu_offload": True}, lambda e: e.on_device),
    ],
)
def test_what_is_advised_helps(
    large: Path, changes: dict[str, object], smaller: Callable[[memory.MemoryEstimate], int]
) -> None:
    plain = asked(large, free=2**60)
    helped = asked(large, CPU.model_copy(update=changes), free=2**60)
    assert smaller(helped) < 0.6 * smaller(plain)


@pytest.mark.parametrize(
    ("attention", "checkpointing", "scores"),
    [
        # Of 36 layers with 32 heads: weights, and the softmax they come from.
        ("eager", False, 36 * 32 * 16384**2 * 8),
        ("eager", True, 32 * 16384**2 * 8),
        ("sdpa", False, 0),
    ],
)
def test_scores_that_are_written_out_are_refused_with_their_size(
    large: Path, attention: str, checkpointing: bool, scores: int
) -> None:
    settings = FsdpSettings(device="cpu", attention=attention, gradient_checkpointing=checkpointing)
    mask = 5 * 16384**2
    found = asked(large, settings, tokens=16384, free=2**60)
    assert found.scores == scores + mask
    said = rf"attention scores {(scores + mask) / GIB:.1f} GiB.*try .*fsdp.attention = 'auto'"
    with pytest.raises(ValueError, match=said):
        asked(large, settings, tokens=16384, free=128 * GIB)


@pytest.mark.parametrize("tokens", [8192, 131_072])
def test_ours_holds_a_few_blocks_of_scores_at_a_time(large: Path, tokens: int) -> None:
    for attention in ("packed", "varlen", "auto"):
        settings = CPU.model_copy(update={"attention": attention})
        assert asked(large, settings, tokens=tokens, free=2**60).scores < GIB


@pytest.mark.parametrize(
    "name", ["qwen3", "llama", "gpt_neox", "gemma3", "olmoe", "phi3", "lfm2", "qwen3_5"]
)
def test_activations_are_estimated_within_a_factor_of_two(name: str) -> None:
    """Against what autograd keeps, less what a chunked head would not."""
    model = make(name)
    made = rows(8)
    batch = micro_batch(made, range(len(made)))
    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inside = _Inside(model)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: note(t) if inside.now else t, lambda t: t
    ):
        out = logprobs(model, batch)
    assert out.requires_grad
    estimated = memory.estimate_memory(model, CPU, ranks=1, tokens=batch.tokens).activations
    assert 0.5 < estimated / sum(kept.values()) < 2


class _Inside:
    """Whether some block is at work."""

    def __init__(self, model: nn.Module) -> None:
        self.now = False
        for block in transformer_blocks(model):
            block.register_forward_pre_hook(lambda *_: self._set(True))
            block.register_forward_hook(lambda *_: self._set(False))

    def _set(self, now: bool) -> None:
        self.now = now


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_takes_what_was_estimated(
    tmp_path: Path, one_rank: None, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Beside weights and moments, of a model with a large head: measured, on one rank. Without what
    backward begins with it would be half as much again."""
    sizes = tiny_sizes(4000, head_dim=64) | {"hidden_size": 256, "intermediate_size": 512}
    config = Qwen3Config(**sizes, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    given: Any = {"compute_dtype": dtype, "gradient_checkpointing": True}
    learner = build(tmp_path, fsdp=given)
    [batches] = pack(rows(8), ranks=1, budget=150)
    learner.train(batches, version=3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        learner.train(batches, version=3)
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    estimate = memory.estimate_memory(
        memory.meta_model(tmp_path),
        FsdpSettings(device="cpu", **given),
        ranks=1,
        tokens=max(batch.tokens for batch in batches),
    )
    expected = estimate.on_device - estimate.state + estimate.gradients
    assert max(accumulate(changes)) == pytest.approx(expected, rel=0.2)


def test_pinned_memory_is_counted_as_torch_takes_it(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By powers of two: each shard, each gradient, and each activation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [memory._pinned(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    given: Any = {"compute_dtype": "bfloat16", "gradient_checkpointing": True}
    settings = FsdpSettings(
        device="cuda", cpu_offload=True, activation_offloading=True, replicas=2, **given
    )
    model = memory.meta_model(large)
    found = memory.estimate_memory(model, settings, ranks=16, tokens=1000)
    assert found.waiting == 36 * 2**23  # 1000 x 4096 x 2 bytes
    shards = [4 * parameter.numel() // 8 for parameter in model.parameters()]
    taken = sum(2 ** math.ceil(math.log2(shard)) for shard in shards)
    assert found.gradients == taken > 1.2 * sum(shards)
    assert found.state == 2 * taken + 2 * sum(shards)
    here = settings.model_copy(update={"device": "cpu"})
    assert memory.estimate_memory(model, here, ranks=16, tokens=1000).gradients == sum(shards)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    asked(folder, vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match=f"tokenizer has 62 tokens, the model embeds {VOCABULARY}"):
        asked(folder, vocabulary=VOCABULARY + 1)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-folder"):
        asked(Path("./no-such-folder"))


def test_memory_is_shared_by_the_ranks_of_a_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(folder)
    needed = found.on_device + found.on_host
    monkeypatch.setattr(memory, "free_host_memory", lambda: 2 * needed)
    asked(folder, local_ranks=2)
    with pytest.raises(ValueError, match="does not fit"):
        asked(folder, local_ranks=3)


def test_free_memory_is_some_of_the_machine_s() -> None:
    assert 2**20 < memory.free_host_memory() < 2**50


def test_what_a_container_keeps_of_files_counts_as_free(tmp_path: Path) -> None:
    """A model that was just read fills the group's page cache, which the kernel gives back."""
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nfile {6 * GIB}\ninactive_file {5 * GIB}\n")
    assert free_cgroup_memory(tmp_path) == 6 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_cgroup_memory(tmp_path) is None
    assert free_cgroup_memory(tmp_path / "nowhere") is None


def test_so_does_one_of_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.usage_in_bytes").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {5 * GIB}\n")
    assert free_cgroup_v1_memory(tmp_path) == 6 * GIB
    assert free_cgroup_v1_memory(tmp_path / "nowhere") is None


def test_a_gpu_that_this_process_does_not_use_is_asked_by_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context would stay on it for as long as this process lives."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("a context was made"))
    settings = FsdpSettings(device="cuda")
    monkeypatch.setattr(memory, "_ASK", "print(1)")
    with pytest.raises(ValueError, match=r"does not fit.*and has 0\.0 GiB of GPU memory"):
        asked(folder, settings)
    monkeypatch.setattr(memory, "_ASK", f"print({GIB})")
    assert asked(folder, settings).on_device < GIB
    monkeypatch.setattr(memory, "_ASK", "raise SystemExit('no driver')")
    with pytest.raises(ValueError, match=r"fsdp\.device: the GPU does not say .*: no driver"):
        asked(folder, settings)


def test_offloaded_parameters_are_gathered_on_the_device_by_one_rank_too(large: Path) -> None:
    offloaded = FsdpSettings(device="cpu", cpu_offload=True)
    found = asked(large, offloaded, free=2**60)
    # The embeddings, the head and two of the 36 blocks, in float32.
    assert 4 * 2 * 151_936 * 4096 < found.whole < found.parameters * 4 / 2


def test_a_reference_is_a_second_model_s_weights(large: Path) -> None:
    plain = memory.check_fits_memory(large, CPU, ranks=2, local_ranks=2, tokens=1, free=2**60)
    beside = memory.check_fits_memory(
        large, CPU, ranks=2, local_ranks=2, tokens=1, free=2**60, reference=True
    )
    assert beside.state - plain.state == 4 * plain.parameters // 2


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_what_has_no_safetensors_is_held_whole_by_every_rank(
    large: Path, tmp_path: Path, file: str
) -> None:
    shutil.copytree(large, other := tmp_path / "other")
    by_parts = memory.loading_bytes(memory.meta_model(other), 8)
    (other / file).touch()
    found = asked(other, ranks=8, local_ranks=8, free=2**60)
    assert found.loading == 4 * found.parameters > 8 * by_parts
    (other / "model.safetensors.index.json").touch()  # those are read where both are there
    assert memory.loading_bytes(memory.meta_model(other), 8) == by_parts


def test_an_offloaded_model_still_needs_the_host_s_memory_on_a_cpu(large: Path) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        asked(large, FsdpSettings(device="cpu", cpu_offload=True), free=64 * GIB)


@pytest.mark.parametrize(
    ("changes", "gib", "message"),
    [
        # Twelve bytes a parameter, for eight ranks' copies of an eighth each.
        ({}, 92, r"a rank: a checkpoint's copy 11\.4 GiB, loading 0\.6 GiB"),
        # And sixteen that are never on the GPU, half of them pinned.
        (
            {"cpu_offload": True},
            234,
            r"a rank: offloaded weights, .* 17\.8 GiB, a checkpoint's copy",
        ),
    ],
    ids=["plain", "offloaded"],
)
def test_the_host_has_to_have_room_beside_the_gpus(
    large: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, bool], gib: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = FsdpSettings(device="cuda", compute_dtype="bfloat16").model_copy(update=changes)
    given: dict[str, int] = {"ranks": 8, "local_ranks": 8, "free": 80 * GIB}
    asked(large, settings, **given, free_host=gib * GIB)
    with pytest.raises(ValueError, match=message) as error:
        asked(large, settings, **given, free_host=(gib - 2) * GIB)
    assert "8 ranks on this machine need about" in str(error.value)
    assert ("fsdp.cpu_offload = false" in str(error.value)) is settings.cpu_offload
    # As many GPUs on twice as many machines.
    asked(large, settings, **(given | {"local_ranks": 4}), free_host=(gib // 2 + 1) * GIB)


def test_adapters_leave_the_base_in_half_the_memory_on_a_gpu(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: dict[str, int] = {"free": 2**60, "free_host": 2**60}
    for settings, size in (
        (FsdpSettings(device="cuda", lora=LoraSettings()), 2),
        (FsdpSettings(device="cuda", lora=LoraSettings(), frozen_dtype="float32"), 4),
        (FsdpSettings(device="cpu", lora=LoraSettings()), 4),
    ):
        found = asked(large, settings, **given)
        adapters = (found.state - size * found.parameters) / found.parameters
        assert 0 < adapters < 16 * 0.01


def test_a_model_without_named_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear names no blocks.*cannot be sharded"):
        transformer_blocks(nn.Linear(2, 2))


def test_settings_that_are_not_for_the_model_are_refused_before_training(folder: Path) -> None:
    with pytest.raises(ValueError, match="has no routers"):
        build_model(folder, FsdpSettings(device="cpu", routing="r3"))


def test_copies_of_the_model_are_shared_by_fewer_ranks(large: Path) -> None:
    def state(ranks: int, replicas: int) -> int:
        settings = FsdpSettings(device="cpu", replicas=replicas)
        return memory.estimate_memory(
            memory.meta_model(large), settings, ranks=ranks, tokens=1000
        ).state

    assert state(8, 2) == state(4, 1) == 2 * state(8, 1)


def test_moments_in_bfloat16_take_half(large: Path) -> None:
    model = memory.meta_model(large)
    one, other = (
        memory.estimate_memory(model, CPU, ranks=2, tokens=1000, moment_bytes=each)
        for each in (OptimSettings().moment_bytes, OptimSettings(moments="bfloat16").moment_bytes)
    )
    count = one.parameters
    assert (one.state, other.state) == (16 * count // 2, 12 * count // 2)
    assert (one.copied, other.copied) == (12 * count // 2, 8 * count // 2)


def test_offloaded_activations_wait_in_the_hosts_memory(large: Path) -> None:
    model = memory.meta_model(large)
    kept, moved = (
        memory.estimate_memory(
            model, FsdpSettings(device="cpu", activation_offloading=each), ranks=1, tokens=1000
        )
        for each in (False, True)
    )
    assert kept.waiting == 0
    assert moved.waiting == kept.activations
    assert moved.on_host == kept.on_host + kept.activations
    assert "offloaded activations" in moved.of_host
    assert "offloaded activations" not in kept.of_host


def test_of_what_a_selective_policy_keeps_nothing_waits_in_the_hosts_memory(large: Path) -> None:
    model = memory.meta_model(large)
    plain, selective = (
        memory.estimate_memory(
            model,
            FsdpSettings(device="cpu", activation_offloading=True, gradient_checkpointing=kind),
            ranks=1,
            tokens=1000,
        )
        for kind in (True, "selective")
    )
    assert selective.waiting == plain.waiting == 36 * 1000 * 4096 * 4
    assert selective.activations > 3 * plain.activations

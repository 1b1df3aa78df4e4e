"""FSDP2 around models of several kinds, on one rank: layouts change no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BloomConfig

from support.trainer.forward_checks import agree
from support.trainer.row_samples import rows
from support.trainer.tiny_models import logprobs, make, plain
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.checkpoint.hf_export import as_hf_tensors, full_tensors
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import (
    check_replicas,
    compute_device,
    destroy_process_group,
    init_process_group,
)
from tracegrad_trainer.engine.model.hf_config import transformer_blocks
from tracegrad_trainer.engine.model.parallelize import build_sharded, prepare_model, shard

MADE = rows(5)
BATCH = micro_batch(MADE, range(len(MADE)))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    yield init_process_group(FsdpSettings(device="cpu", threads=1))
    destroy_process_group()
    assert not dist.is_initialized()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    logprobs(model, BATCH).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3", "gpt2", "gpt_neox", "phi3", "mixtral", "gpt_oss"]
)
def test_sharded_blocks_have_the_gradients_of_the_whole(name: str, mesh: DeviceMesh) -> None:
    expected = gradients(make(name))
    model = shard(make(name), mesh, FsdpSettings(device="cpu"))
    assert isinstance(model, FSDPModule)
    assert [isinstance(block, FSDPModule) for block in transformer_blocks(model)] == [True, True]
    agree(gradients(model), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"reshard": False},
        {"cpu_offload": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "cpu_offload": True, "reshard": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_layouts_change_no_gradient(name: str, changes: dict[str, bool], mesh: DeviceMesh) -> None:
    """Offloading too: on a CPU it has nowhere to move anything, and moves nothing."""
    expected = gradients(shard(make(name), mesh, FsdpSettings(device="cpu")))
    settings = FsdpSettings(device="cpu", **changes)  # type: ignore[arg-type]
    agree(gradients(shard(make(name, **changes), mesh, settings)), expected, tolerance=1e-6)


def test_bfloat16_is_of_the_computation_only(mesh: DeviceMesh) -> None:
    settings = FsdpSettings(device="cpu", compute_dtype="bfloat16")
    model = shard(make("qwen3"), mesh, settings)
    seen: set[torch.dtype] = set()
    transformer_blocks(model)[0].register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    found = gradients(model)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    exact = gradients(make("qwen3"))
    for name, grad in found.items():
        apart = (grad - exact[name]).norm() / exact[name].norm()
        assert 1e-4 < apart < 0.1, name


def test_a_model_without_safetensors_is_loaded_whole(
    mesh: DeviceMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = plain("qwen3")
    whole.config.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    settings = FsdpSettings(device="cpu")
    model = build_sharded(tmp_path, mesh, settings)
    assert "is not in plain safetensors" in caplog.text
    with torch.no_grad():
        assert torch.equal(logprobs(model, BATCH), logprobs(make("qwen3"), BATCH))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"its files lack \d+ of the tensors") as error:
        build_sharded(tmp_path, mesh, settings)
    assert str(error.value).startswith(f"model = '{tmp_path}': ")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granite_moe", "gpt_neox", "gpt_oss"])
def test_what_was_loaded_by_parts_leaves_under_the_names_it_came_by(
    name: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    plain(name).save_pretrained(tmp_path)  # type: ignore[operator]
    model = build_sharded(tmp_path, mesh, FsdpSettings(device="cpu"))
    found = dict(as_hf_tensors(model, full_tensors(model)))
    files = load_file(tmp_path / "model.safetensors")
    assert found.keys() == files.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in files.items())


def test_ranks_compute_where_their_mesh_is(mesh: DeviceMesh) -> None:
    assert compute_device(mesh) == torch.device("cpu")


def test_a_dropout_that_is_a_module_is_none() -> None:
    """BLOOM's is one; the model cannot be trained for other reasons, which are what is said."""
    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    for name, why in (("tracegrad_packed", "set fsdp.attention"), ("eager", "see each other")):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
        with pytest.raises(ValueError, match=why):
            prepare_model(model, FsdpSettings(device="cpu"))
        dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        assert dropouts
        assert not any(dropouts)


def test_copies_that_the_ranks_cannot_hold_are_refused() -> None:
    check_replicas(4, 2)
    with pytest.raises(ValueError, match=r"fsdp.replicas = 3: 4 ranks .*one of \[1, 2, 4\]"):
        check_replicas(4, 3)

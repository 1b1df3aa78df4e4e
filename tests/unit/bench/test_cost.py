"""The model of cost: bytes that are exact, laws that must hold, and the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.cost import __main__ as program
from bench.cost.measured import measure, predicted, sizes
from bench.cost.model import (
    H100,
    Shapes,
    checkpoint_seconds,
    interval_for,
    memory_cost,
    push_seconds,
    step_cost,
)
from bench.gpu_check.models import LARGE, random_model

from tracegrad_trainer.engine import FsdpSettings


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes.of(random_model(LARGE, "sdpa", "meta"))


def test_shapes_are_the_models(shapes: Shapes) -> None:
    """Qwen3-0.6B: 596 million weights, 440 of them in its blocks."""
    assert shapes.parameters == pytest.approx(596e6, rel=0.01)
    assert shapes.blocks * shapes.block == pytest.approx(440e6, rel=0.01)
    assert shapes.served == 2 * shapes.parameters
    # 6 a weight of the body and of the head, which is the embedding.
    assert shapes.token == pytest.approx(6 * 596e6, rel=0.01)
    # Attention costs as much as all else where a token sees so many.
    assert shapes.token / shapes.attended == pytest.approx(6 * 596e6 / (12 * 28 * 2048), rel=0.01)


def test_a_step_takes_its_operations_or_its_transfers(shapes: Shapes) -> None:
    one = step_cost(shapes, H100, gpus=1, tokens=16_384, row=4096)
    assert one.gather == 0
    assert one.compute == pytest.approx(shapes.row(4096) * 4 * 4 / 3 / (989e12 * 0.4))
    eight = step_cost(shapes, H100, gpus=8, tokens=16_384, row=4096)
    assert eight.tokens_per_s == pytest.approx(8 * one.tokens_per_s)
    short = step_cost(shapes, H100, gpus=64, tokens=64, row=64)
    assert short.exposed
    assert short.tokens_per_s < 64 * step_cost(shapes, H100, gpus=1, tokens=64, row=64).tokens_per_s
    longer = step_cost(shapes, H100, gpus=1, tokens=65_536, row=65_536)
    assert longer.tokens_per_s < one.tokens_per_s, "attention grows with the square"


def test_between_nodes_all_gpus_of_a_node_share_the_traffic() -> None:
    """NCCL's bus bandwidth of 8 GPUs with 400 Gb/s each is near NVLink's, not an eighth of it."""
    assert H100.collective(8) == H100.link
    assert H100.collective(64) == 8 * H100.network < H100.link
    slow = replace(H100, network=1e9)
    assert slow.collective(64) == 8e9
    assert replace(H100, network=H100.link).collective(64) == H100.link


def test_memory_is_the_trainers_own_estimate() -> None:
    model = random_model(LARGE, "sdpa", "meta")
    fsdp = FsdpSettings(device="cuda", compute_dtype="bfloat16")
    eight, sixteen = (memory_cost(model, fsdp, H100, gpus=n, tokens=4096) for n in (8, 16))
    assert eight.gpu > sixteen.gpu
    assert eight.host == pytest.approx(2 * sixteen.host, rel=0.01), "of a node, not of all"


def test_transfers_are_bytes_over_bandwidths(shapes: Shapes) -> None:
    push = push_seconds(shapes, H100, gpus=8)
    assert push["write"] == pytest.approx(2 * shapes.parameters / H100.shared_memory)
    assert push_seconds(shapes, H100, gpus=1)["gather"] == 0
    assert push_seconds(shapes, H100, gpus=64)["gather"] > push["gather"]
    shared = push_seconds(shapes, H100, gpus=8, transport="ipc")
    assert {name for name in push if push[name] != shared[name]} == {"load"}
    assert shared["load"] == pytest.approx(push["gather"] + 2 * shapes.parameters / H100.link)
    one, many = (checkpoint_seconds(shapes, H100, gpus=n) for n in (8, 64))
    saved = 12 * shapes.parameters
    assert one["write"] == pytest.approx(saved / 5e9)
    assert many["write"] == pytest.approx(one["write"] / 8)
    assert interval_for(shapes, H100, gpus=8, step_s=one["write"] / 2.5) == 3
    assert interval_for(shapes, H100, gpus=8, step_s=100) == 1


def test_bytes_on_the_disk_are_those_of_the_model(tmp_path: Path) -> None:
    """Beside them a file has names and shapes, some hundred bytes a tensor; a checkpoint random
    numbers too. Of a model of some size that is nothing."""
    size = sizes(tiny=True)[-1]
    torch.set_num_threads(1)
    found = measure(size, tmp_path, tiny=True)
    assert 0 <= found.written["push files"] - found.expected["push files"] < 300 * 50
    assert 0 <= found.written["checkpoint"] - found.expected["checkpoint"] < 2500 * 170
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert predicted([found, found], "step") == pytest.approx(found.seconds["step"])


def test_the_page_names_every_model_and_what_was_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: program._models()[name] for name in ("0.6B", "70B")}
    monkeypatch.setattr(program, "_models", lambda: some)
    assert program.main(["--quick", "--out", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert page.strip() in capsys.readouterr().out
    for name in some:
        assert page.count(f"\n| {name} | ") == 6
    assert "| 70B | 1 | 1," in page
    assert "None of it was measured on a GPU by us" in page

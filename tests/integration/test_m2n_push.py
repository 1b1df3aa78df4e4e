"""Pushes from every rank's shards: what vLLM's `nccl_m2n` is told of them, and what they are.

Real ranks over gloo and vLLM's own trainer side; no NCCL and no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.trainer import m2n_ranks
from support.trainer.ranks import run_on_ranks
from support.trainer.tiny_models import plain

pytestmark = pytest.mark.vllm  # its classes, not its engine
NAMES = ["qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m2n")
    for name in NAMES:
        plain(name).save_pretrained(folder / name)
    run_on_ranks(m2n_ranks.main, 2, folder, NAMES)
    return folder


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_shards_make_up_the_model_that_a_push_carries(
    folder: Path, name: str, replicas: int
) -> None:
    """Bit by bit, under the names of its folder, in the dtype that is served."""
    seen = json.loads((folder / f"{name}-{replicas}.json").read_text())
    assert seen["wrong"] == []
    assert seen["names"]
    assert seen["updates"]
    source = [2, 1]  # shards and copies of them, or with HSDP the other way round
    assert seen["parsed"] == {"offset": 2, "source": source, "destination": [2, 2]}
    assert "NCCL says no; ranks and vLLM may wait for each other" in seen["failure"]


def test_attention_is_never_gathered_and_experts_are(folder: Path) -> None:
    dense, mixture = (json.loads((folder / f"{name}-1.json").read_text()) for name in NAMES)
    for seen in (dense, mixture):
        assert "model.layers.0.self_attn.q_proj.weight" in seen["sharded"]
    assert "model.layers.1.mlp.down_proj.weight" in dense["sharded"]
    # They are stacked in the learner, and one by one in the folder.
    assert not any("experts" in name for name in mixture["sharded"])

"""Later steps on a batch replay the experts that were chosen before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learn_samples import VOCABULARY, rows
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.tiny_model import tiny_sizes
from tracegrad_trainer.batches import pack
from tracegrad_trainer.fsdp import (
    FsdpSettings,
    Learner,
    OptimSettings,
    build_model,
    shard,
    start_ranks,
    stop_ranks,
)
from tracegrad_trainer.fsdp.forward import Before
from tracegrad_trainer.objectives import preset


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    start_ranks(FsdpSettings(device="cpu", threads=1))
    yield
    stop_ranks()


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**tiny_sizes(VOCABULARY, head_dim=8, **experts))
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    settings = FsdpSettings(device="cpu", routing="r2")
    mesh = init_device_mesh("cpu", (1,))
    model = shard(build_model(tmp_path, settings), mesh, settings)
    return Learner(model, mesh, preset("grpo"), OptimSettings(lr=3e-2))


def test_choices_of_before_the_batch_hold_while_the_router_moves(learner: Learner) -> None:
    batches: Any = pack(rows(6), ranks=1, budget=100)[0]
    routed = learner.routed(batches)
    assert [batch.routes.shape for batch in routed] == [(b.tokens, 2, 2) for b in batches]
    old = [Before(old=logp) for logp in learner.logprobs(batches)]
    for mine, replayed in zip(learner.logprobs(batches), learner.logprobs(routed), strict=True):
        torch.testing.assert_close(mine, replayed)
    for _ in range(3):
        assert learner.train(routed, version=3, before=old).applied
    now = learner.routed(batches)
    moved = [bool((a.routes != b.routes).any()) for a, b in zip(now, routed, strict=True)]
    assert any(moved)
    free, held = learner.logprobs(batches), learner.logprobs(routed)
    assert max(float((a - b).abs().max()) for a, b in zip(free, held, strict=True)) > 1e-3

"""Later steps on a batch replay the experts that were chosen before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.trainer.learners import build
from support.trainer.row_samples import VOCABULARY, rows
from support.trainer.tiny_model import tiny_sizes
from tracegrad_trainer.batches import pack
from tracegrad_trainer.batches.expert_routing import UNROUTED
from tracegrad_trainer.engine import (
    Learner,
)
from tracegrad_trainer.engine.step.epochs import prepare_batch, train_epochs

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**tiny_sizes(VOCABULARY, head_dim=8, **experts))
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    return build(tmp_path, fsdp={"routing": "r2"}, lr=3e-2)


def test_choices_of_before_the_batch_hold_while_the_router_moves(learner: Learner) -> None:
    batches: Any = pack(rows(6), ranks=1, budget=100)[0]
    start = prepare_batch(learner, batches)
    routed = start.micro_batches
    assert [batch.expert_routing.shape for batch in routed if batch.expert_routing is not None] == [
        (b.tokens, 2, 2) for b in batches
    ]
    for known, free, replayed in zip(
        start.before, learner.logprobs(batches), learner.logprobs(routed), strict=True
    ):
        torch.testing.assert_close(known.old_logprobs, free)
        torch.testing.assert_close(known.old_logprobs, replayed)
    done = train_epochs(learner, [batches], epochs=3, version=3)
    assert done.metrics["updates"] == 3
    now = prepare_batch(learner, batches).micro_batches
    moved = [
        bool((a.expert_routing != b.expert_routing).any()) for a, b in zip(now, routed, strict=True)
    ]
    assert any(moved)
    free, held = learner.logprobs(batches), learner.logprobs(routed)
    assert max(float((a - b).abs().max()) for a, b in zip(free, held, strict=True)) > 1e-3


def test_what_the_engine_reported_stays_and_the_router_fills_the_rest(learner: Learner) -> None:
    """R3 with several steps on a batch."""
    batches: Any = pack(rows(6), ranks=1, budget=100)[0]
    own = prepare_batch(learner, batches).micro_batches
    reported = []
    for batch in own:
        routes = (7 - batch.expert_routing).copy()
        routes[::2] = UNROUTED
        reported.append(replace(batch, expert_routing=routes))
    for batch, given in zip(prepare_batch(learner, reported).micro_batches, reported, strict=True):
        assert batch.expert_routing is not None
        assert (batch.expert_routing[1::2] == given.expert_routing[1::2]).all()
        assert (batch.expert_routing != UNROUTED).all()


def test_all_steps_on_a_batch_take_the_same_experts(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: Any = pack(rows(6), ranks=1, budget=100)[0]
    expected = [batch.expert_routing for batch in prepare_batch(learner, batches).micro_batches]
    update, seen = learner.update, []
    monkeypatch.setattr(learner, "update", lambda b, **k: seen.append(b) or update(b, **k))
    train_epochs(learner, [batches], epochs=2, version=3)
    assert len(seen) == 2
    for micro_batches in seen:
        for batch, routes in zip(micro_batches, expected, strict=True):
            assert (batch.expert_routing == routes).all()

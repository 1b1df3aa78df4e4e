"""The same optimizer step on this device and on the host's CPU, in float32: its loss, and by how
much every weight moved. Of kinds of models, and of each way to lay a step out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bench.gpu_check.check import Finding, Machine, in_a_line, judged
from bench.gpu_check.models import forked, random_rows
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    OptimSettings,
    destroy_process_group,
    full_tensors,
    init_process_group,
    shard,
)
from tracegrad_trainer.engine.model import router_replay
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.losses import preset

VOCABULARY = 512
# The loss alone would be nearly the same of any weights: rows are on policy, so ratios are 1.
_COMPARED = ("loss", "entropy", "grad_norm")
HEADER = ("step", *_COMPARED, "weights moved")
# Of float32 sums in another order over a few hundred terms, through four layers and AdamW's root.
BOUND = 1e-3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
_EXPERTS = {"num_experts_per_tok": 2}
_CONFIGS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**_SIZES),
    "mixture": Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=8, moe_intermediate_size=64),
    "caps and windows": Gemma2Config(**_SIZES, sliding_window=50, query_pre_attn_scalar=32),
    "sinks": GptOssConfig(**_SIZES, **_EXPERTS, num_local_experts=8, sliding_window=50),
}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    kind: str = "dense"
    settings: dict[str, Any] = field(default_factory=dict)
    tree: bool = False
    routes: bool = False  # rows say which experts their tokens go to


@dataclass(frozen=True, slots=True)
class Step:
    metrics: dict[str, float]
    moved: dict[str, Tensor]  # by how much each weight


VARIANTS = (
    *(Variant(kind, kind) for kind in _CONFIGS),
    Variant("a tree", tree=True),
    Variant("a tree, caps and windows", "caps and windows", tree=True),
    Variant("whole parameters", settings={"reshard": False}),
    Variant("blocks recomputed", settings={"gradient_checkpointing": True}),
    Variant("offloaded", settings={"cpu_offload": True}),
    Variant("adapters", settings={"lora": {"rank": 8}, "frozen_dtype": "float32"}),
    Variant("adapters of a mixture", "mixture", {"lora": {"rank": 8}, "frozen_dtype": "float32"}),
    Variant("routes replayed", "mixture", {"routing": "r3"}, routes=True),
)


def check(machine: Machine) -> Finding:
    chosen = VARIANTS[:5] if machine.tiny else VARIANTS
    rows: list[list[str]] = []
    worst, failed = 0.0, []
    for variant in chosen:
        try:
            expected, found = _step(variant, "cpu"), _step(variant, machine.fsdp_device)
        except Exception as error:
            rows.append([variant.name, in_a_line(error), "", "", ""])
            failed.append(variant.name)
            continue
        apart = [*_metrics_apart(found, expected), _apart(found.moved, expected.moved)]
        worst = max(worst, *apart)
        rows.append([variant.name, *(f"{each:.0e}" for each in apart)])
    said = f"{len(chosen)} steps, at most {worst:.0e} apart (bound {BOUND:.0e})"
    said += f"; failed: {'; '.join(failed)}" if failed else ""
    return judged(worst <= BOUND and not failed, said, HEADER, rows)


def _metrics_apart(found: Step, expected: Step) -> list[float]:
    """As a share. What is not a number is apart from everything."""
    pairs = [(found.metrics[name], expected.metrics[name]) for name in _COMPARED]
    apart = [abs(a - b) / max(abs(b), 1e-6) for a, b in pairs]
    return [each if math.isfinite(each) else math.inf for each in apart]


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of what the step moved."""
    off = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    size = sum(float(each.square().sum()) for each in expected.values())
    return math.sqrt(off / max(size, 1e-30))


def _step(variant: Variant, device: str) -> Step:
    settings = FsdpSettings.model_validate(
        {"device": device, "compute_dtype": "float32", "attention": "packed", **variant.settings}
    )
    mesh = init_process_group(settings)
    try:
        model = shard(prepare_model(_model(variant.kind), settings), mesh, settings)
        # SGD-like: AdamW divides by a gradient's size, so where that is about 0 rounding decides.
        optim = OptimSettings(lr=1e-2, eps=1.0, max_grad_norm=float("inf"))
        learner = Learner(model, mesh, preset("grpo"), optim, reshard=settings.reshard)
        made = random_rows((120, 90, 60, 30), VOCABULARY)
        made = [forked(row) for row in made] if variant.tree else made
        if variant.routes:
            made = [_routed(row, model, i) for i, row in enumerate(made)]
        before = {name: tensor.cpu().clone() for name, tensor in full_tensors(model)}
        (batches,) = pack(made, ranks=1, budget=200)
        done = learner.train(batches, version=0)
        moved = {name: tensor.cpu() - before[name] for name, tensor in full_tensors(model)}
    finally:
        destroy_process_group()
    return Step({name: float(done.metrics[name]) for name in _COMPARED}, moved)


def _routed(row: Row, model: nn.Module, seed: int) -> Row:
    """To experts of which a router knows nothing: without replay it would choose others."""
    layout = router_replay.routing_layout_of(model)
    drawn = np.random.default_rng(seed).random((len(row), len(layout.routed), layout.experts))
    routes = drawn.argsort(-1)[..., : layout.k].astype(layout.dtype)
    return replace(row, expert_routing=routes)


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        _CONFIGS[kind], dtype=torch.float32, attn_implementation="tracegrad_packed"
    )
    return model

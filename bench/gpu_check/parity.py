"""The same optimizer step on this device and on the host's CPU, in float32: its loss, and by how
much every weight moved. Of kinds of models, and of each way to lay a step out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

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

from bench.gpu_check.check import Finding, Machine, judged
from bench.gpu_check.models import forked, random_rows
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    OptimSettings,
    destroy_process_group,
    full_tensors,
    init_process_group,
    shard,
)
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.losses import preset

VOCABULARY = 512
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


VARIANTS = (
    *(Variant(kind, kind) for kind in _CONFIGS),
    Variant("a tree", tree=True),
    Variant("a tree, caps and windows", "caps and windows", tree=True),
    Variant("whole parameters", settings={"reshard": False}),
    Variant("blocks recomputed", settings={"gradient_checkpointing": True}),
    Variant("offloaded", settings={"cpu_offload": True}),
    Variant("adapters", settings={"lora": {"rank": 8}, "frozen_dtype": "float32"}),
    Variant("adapters of a mixture", "mixture", {"lora": {"rank": 8}, "frozen_dtype": "float32"}),
    Variant("routes replayed", "mixture", {"routing": "r2"}),
)


def check(machine: Machine) -> Finding:
    chosen = VARIANTS[:5] if machine.tiny else VARIANTS
    rows: list[list[str]] = []
    worst = 0.0
    for variant in chosen:
        loss, expected = _step(variant, "cpu")
        found_loss, found = _step(variant, machine.fsdp_device)
        apart = [abs(found_loss - loss) / max(abs(loss), 1e-6), _apart(found, expected)]
        worst = max(worst, *apart)
        rows.append([variant.name, *(f"{each:.0e}" for each in apart)])
    said = f"{len(chosen)} steps, at most {worst:.0e} apart (bound {BOUND:.0e})"
    return judged(worst <= BOUND, said, ("step", "loss", "weights moved"), rows)


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of what the step moved."""
    off = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    size = sum(float(each.square().sum()) for each in expected.values())
    return math.sqrt(off / max(size, 1e-30))


def _step(variant: Variant, device: str) -> tuple[float, dict[str, Tensor]]:
    """The loss, and by how much each weight moved."""
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
        before = {name: tensor.cpu().clone() for name, tensor in full_tensors(model)}
        (batches,) = pack(made, ranks=1, budget=200)
        done = learner.train(batches, version=0)
        moved = {name: tensor.cpu() - before[name] for name, tensor in full_tensors(model)}
    finally:
        destroy_process_group()
    return float(done.metrics["loss"]), moved


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        _CONFIGS[kind], dtype=torch.float32, attn_implementation="tracegrad_packed"
    )
    return model

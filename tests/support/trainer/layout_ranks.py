"""One optimizer step of several objectives, laid out in many ways; for `test_layout_invariance`.

`main` is what each of several ranks does: `<folder>/<ranks>.pt` gets what rank 0 saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from support.trainer.fsdp_ranks import VERSION, step
from support.trainer.learners import build, save_checkpoint, weights
from support.trainer.row_samples import POISON, rows
from tracegrad_trainer.batches import (
    MicroBatch,
    PackingRule,
    Row,
    micro_batch,
    mismatched_rows,
    pack,
)
from tracegrad_trainer.batches.micro_batch import StepCounts
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    destroy_process_group,
    init_process_group,
    load_checkpoint,
    train_batch,
)
from tracegrad_trainer.engine.model import compile as compile_blocks
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.losses import ObjectiveSettings, preset

OBJECTIVES: dict[str, ObjectiveSettings] = {
    "grpo": preset("grpo", kl="k3", kl_coef=0.1),
    "turn_mean": preset(
        "grpo", aggregation="turn_mean", whiten=True, entropy_coef=0.05, entropy_target=3.0
    ),
    "gspo": preset("gspo", clip_low=0.2, clip_high=0.2),
    "rloo": preset("rloo", clip_low=0.9, clip_high=9.0),
    "topr": preset("topr"),
    "ipa": preset("ipa", imitation=0.5),
    "ppo": preset("ppo"),
    "by_group": preset("grpo", aggregation="group_mean", correction_level="sequence_product"),
    "by_turn": preset("ppo", gae_level="turn", gamma=0.9, ratio="turn"),
    "dpo": preset("dpo"),
    "kto": preset("kto"),
}
# What four ranks are given: each way to sum over tokens, turns, rollouts, groups and pairs. The
# others differ from these in a token's own term, which two ranks compare.
OF_FOUR = ("grpo", "turn_mean", "ppo", "by_group", "by_turn", "dpo", "kto")
BUDGET = 100


@dataclass(frozen=True)
class Layout:
    """How a step is laid out; none of it may change what it computes."""

    budget: int = BUDGET
    padded: bool = False  # a forward for each row (or pair), rows of equal length
    settings: dict[str, Any] = field(default_factory=dict)
    elements: int | None = None
    group: int = 1  # ranks that share rows where it is quicker

    def place(self) -> tuple[int, int]:
        """How many ranks have micro-batches of their own, and which of these this one is."""
        alike = self.settings.get("context_parallel", 1)
        return dist.get_world_size() // alike, dist.get_rank() // alike


def made(name: str, *, padded: bool = False) -> list[Row]:
    """Twelve rows, two a rollout, some of an expert's, rewards at their ends."""
    found = []
    for i, row in enumerate(rows(12, seed=7)):
        changes: dict[str, Any] = {"rollout_id": f"r{i // 2}", "group_id": f"g{i // 4}"}
        last = int(np.flatnonzero(row.keep)[-1])
        changes["reward"] = np.zeros_like(row.reward)
        changes["reward"][last] = float(row.advantage[last])
        changes["score"] = float(i % 3)
        # Of either sign, but not so that they cancel: a loss near 0 has no relative accuracy.
        changes["advantage"] = np.where(row.keep, row.advantage + 1.2, 0).astype(np.float32)
        if name == "ipa" and i % 4 == 3:
            changes["demonstration"] = row.loss_mask.copy()
            changes["rollout_logprobs"] = np.zeros_like(row.rollout_logprobs)
            changes["policy_version"] = np.full_like(row.policy_version, -1)
        if name == "by_turn":
            first = len(row.turn_ids) * (i % 2)  # a rollout of two rows: their turns in a line
            changes["turn_numbers"] = tuple(first + k for k in range(len(row.turn_ids)))
        if name in ("dpo", "kto"):
            side = i if name == "dpo" else i // 2
            changes |= {"label": 1 - 2 * (side % 2), "pair": i // 2 if name == "dpo" else -1}
            changes["rollout_id"] = f"r{side}"
        row = replace(row, **changes)
        found.append(_padded(row, 48) if padded else row)
    return found


def _padded(row: Row, length: int) -> Row:
    """Filled up on the right, with tokens that nothing attends to and nobody learns."""
    more = length - len(row)

    def longer(values: Any, fill: Any) -> Any:
        return np.concatenate([values, np.full(more, fill, values.dtype)])

    return replace(
        row,
        input_ids=longer(row.input_ids, 5),
        loss_mask=longer(row.loss_mask, False),
        keep=longer(row.keep, False),
        rollout_logprobs=longer(row.rollout_logprobs, 0),
        policy_version=longer(row.policy_version, -1),
        turn_index=longer(row.turn_index, -1),
        temperature=longer(row.temperature, 1),
        advantage=longer(row.advantage, 0),
        reward=longer(row.reward, 0),
        demonstration=longer(row.demonstration, False),
    )


def models(folder: Path, name: str) -> tuple[Path, Path]:
    """The policy's, and the reference's. For KTO so that its z, which is never negative, is not 0
    whatever the ranks count."""
    found = (folder / "model", folder / "other")
    return found[::-1] if name == "kto" else found


def learner(folder: Path, name: str, layout: Layout = Layout(), **changes: Any) -> Learner:
    model, reference = models(folder, name)
    return build(
        model,
        OBJECTIVES[name],
        fsdp={"threads": 1} | layout.settings,
        value_std=0.3,
        reference=reference,
        elements=layout.elements,
        packing=PackingRule(group=layout.group),
        **({"max_grad_norm": float("inf")} | changes),
    )


def share(name: str, layout: Layout) -> list[MicroBatch]:
    everything = made(name, padded=layout.padded)
    ranks, rank = layout.place()
    if not layout.padded:
        return pack(everything, ranks=ranks, budget=layout.budget)[rank]
    size = 2 if name == "dpo" else 1
    counts = StepCounts.of(everything)
    alone = [
        micro_batch(everything[i : i + size], range(i, i + size), counts)
        for i in range(0, len(everything), size)
    ]
    return alone[rank::ranks]


def others(name: str, layout: Layout) -> list[MicroBatch]:
    """KTO's mismatched rows."""
    if name != "kto":
        return []
    ranks, rank = layout.place()
    looked_at = mismatched_rows(made(name), limit=BUDGET)
    return pack(looked_at, ranks=ranks, budget=layout.budget)[rank]


def before(one: Learner, batches: Sequence[MicroBatch]) -> list[TargetContext]:
    """Not quite what the policy says, so that ratios matter; by row, not by layout."""
    found = []
    for batch, logp in zip(batches, one.logprobs(batches), strict=True):
        noise = np.zeros(len(batch.target), np.float32)
        for number, key in enumerate(batch.row_keys.tolist()):
            here = batch.row == number
            if here.any():
                noise[here] = np.random.default_rng(key).normal(0, 0.3, int(here.sum()))
        found.append(TargetContext(old_logprobs=logp + torch.from_numpy(noise)))
    return found


def run(folder: Path, name: str, layout: Layout = Layout()) -> Any:
    """(StepResult, gradients) of one step."""
    with patch.object(compile_blocks, "_BACKEND", "aot_eager"):  # inductor's takes 20 seconds
        one = learner(folder, name, layout)
    batches = share(name, layout)
    known = before(one, batches)
    if OBJECTIVES[name].correction_level == "sequence_product":
        # The engines nearly agree: of some forty tokens that do not, a product says nothing.
        batches = [
            replace(b, rollout_logprobs=_near(b, k)) for b, k in zip(batches, known, strict=True)
        ]
    return step(one, batches, before=known, mismatched=others(name, layout))


def _near(batch: MicroBatch, known: TargetContext) -> Any:
    assert known.old_logprobs is not None
    return (known.old_logprobs.numpy() + 0.1 * np.sin(batch.row_keys[batch.row])).astype(np.float32)


def poisoned(folder: Path, name: str) -> Any:
    """A step with a row of which the serving engine recorded a number that is not finite."""
    one = learner(folder, name)
    bad = made(name)
    bad[4].rollout_logprobs[bad[4].keep.argmax()] = -np.inf
    batches = pack(bad, ranks=dist.get_world_size(), budget=BUDGET)[dist.get_rank()]
    return step(one, batches, before=before(one, batches))


def without(folder: Path, name: str, gone: Sequence[int]) -> Any:
    """The same step, had those rows never been there; the others keep their numbers."""
    one = learner(folder, name)
    left = [i for i in range(12) if i not in gone]
    everything = made(name)
    batches = pack([everything[i] for i in left], ranks=1, budget=BUDGET, keys=left)[0]
    return step(one, batches, before=before(one, batches))


def batch(folder: Path, name: str, layout: Layout = Layout()) -> Any:
    """(StepResult, weights) of a batch of two optimizer steps a pass, and two passes."""
    critic = {"value_lr": 3e-3, "value_warmup_steps": 1} if name == "ppo" else {}
    one = learner(folder, name, layout, lr=1e-3, minibatches=2, epochs=2, **critic)
    dealt = made(name) if dist.get_rank() == 0 else None
    done = train_batch(one, dealt, version=VERSION, budget=BUDGET)
    return done, weights(one)


SHARED = Layout(settings={"context_parallel": 2})  # two ranks, each micro-batch
GROUPED = Layout(group=2)  # two ranks, in the steps that are quicker by it
REPLICATED = Layout(settings={"replicas": 2})  # HSDP; on two ranks each has all weights
REPLICATED_SHARED = Layout(settings={"replicas": 2, "context_parallel": 2})
BATCHES = ("grpo", "turn_mean", "ppo", "gspo")
VARIANTS = {
    "plain": Layout(),
    "whole": Layout(settings={"reshard": False}),
    "recomputed": Layout(settings={"gradient_checkpointing": True}),
    "offloaded": Layout(settings={"cpu_offload": True}),
    "selective": Layout(settings={"gradient_checkpointing": "selective"}),
    "activations offloaded": Layout(
        settings={"activation_offloading": True, "gradient_checkpointing": True}
    ),
    "compiled": Layout(
        settings={"compile": True, "gradient_checkpointing": True, "activation_offloading": True}
    ),
    "chunked": Layout(elements=300),
}


MOMENTS = ("float32", "bfloat16")


def trained(folder: Path, layout: Layout, moments: str) -> Learner:
    """After a step, a half of one."""
    one = learner(folder, "grpo", layout, lr=1e-3, moments=moments)
    one.train(share("grpo", layout), version=VERSION, share=0.5)
    return one


def resumed(folder: Path, moments: str) -> dict[str, Tensor]:
    """Weights after a step from the checkpoint of four ranks that held two copies."""
    one = learner(folder, "grpo", lr=1e-3, moments=moments)
    load_checkpoint(one, folder / "replicated" / moments / "step-00000001")
    kept = {state["exp_avg"].dtype for state in one.optimizer.state.values()}
    assert kept == {getattr(torch, moments)}
    one.train(share("grpo", Layout()), version=VERSION)
    return weights(one)


MEMORY_VARIANTS = [name for name in VARIANTS if name not in ("plain", "chunked")]


def objectives_of(ranks: int) -> Sequence[str]:
    return OF_FOUR if ranks == 4 else tuple(OBJECTIVES)


def main(folder: Path) -> None:
    init_process_group(FsdpSettings(device="cpu", threads=1))
    assert POISON not in made("grpo")[0].input_ids
    objectives = objectives_of(dist.get_world_size())
    batches = [name for name in BATCHES if name in objectives]
    out: dict[str, Any] = {name: run(folder, name) for name in objectives}
    out["batches"] = {name: batch(folder, name) for name in batches}
    out["shared"] = {name: run(folder, name, SHARED) for name in objectives}
    out["grouped batches"] = {name: batch(folder, name, GROUPED) for name in batches}
    out["shared batches"] = {name: batch(folder, name, SHARED) for name in batches}
    out["replicated"] = {name: run(folder, name, REPLICATED) for name in ("grpo", "ppo", "dpo")}
    out["replicated, shared"] = {"ppo": run(folder, "ppo", REPLICATED_SHARED)}
    out["replicated batches"] = {name: batch(folder, name, REPLICATED) for name in batches}
    if dist.get_world_size() == 4:
        for moments in MOMENTS:
            made_by_four = trained(folder, REPLICATED, moments)
            save_checkpoint(made_by_four, folder / "replicated" / moments, 1, {}, keep=1)
    out["resumed"] = {moments: resumed(folder, moments) for moments in MOMENTS}
    if dist.get_world_size() == 2:
        for variant in MEMORY_VARIANTS:
            out[variant] = run(folder, "ppo", VARIANTS[variant])
        out["poisoned"] = {name: poisoned(folder, name) for name in ("grpo", "ppo", "dpo")}
    if dist.get_rank() == 0:
        torch.save(out, folder / f"{dist.get_world_size()}.pt")
    destroy_process_group()

"""How fast a step is: a dense model of 0.6B and one of 1.7B with 16k tokens, beside the plainest
PyTorch loop on the same rows. Goals: 40 % of the device's peak, and 1.0 times the loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_check.check import Finding, Machine, judged
from bench.gpu_check.models import LARGE, LARGER, TINY, Size, random_model, random_rows
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.engine import FsdpSettings, Learner, OptimSettings, shard
from tracegrad_trainer.engine.distributed import destroy_process_group, init_process_group
from tracegrad_trainer.engine.flops import flops
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.engine.peak_flops import peak_flops
from tracegrad_trainer.losses import preset

STEPS = 3  # measured, after one that is not
GOAL_MFU, GOAL_RATIO = 0.4, 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """One way to take a step. None: did not fit, or is not known of this device."""

    name: str
    tokens_per_s: float | None
    peak_gib: float | None
    mfu: float | None

    def row(self) -> list[str]:
        if self.tokens_per_s is None:
            return [self.name, "does not fit", "", ""]
        peak = "–" if self.peak_gib is None else f"{self.peak_gib:.1f}"
        mfu = "–" if self.mfu is None else f"{self.mfu:.1%}"
        return [self.name, f"{self.tokens_per_s:,.0f}", peak, mfu]


def check(machine: Machine) -> Finding:
    sizes = [TINY] if machine.tiny else [LARGE, LARGER]
    runs: list[Run] = []
    try:
        for size in sizes:
            runs += measure(size, machine)
    finally:
        destroy_process_group()
    best = max((run.mfu or 0.0 for run in runs if run.name.startswith("tracegrad")), default=0.0)
    ratio = min(_ratios(runs), default=0.0)
    if machine.is_gpu and not machine.tiny:
        met = best >= GOAL_MFU and ratio >= GOAL_RATIO
        said = f"MFU {best:.1%} (goal {GOAL_MFU:.0%}), {ratio:.2f} times the plain loop at least"
    else:  # the goals are a GPU's
        met, said = all(run.tokens_per_s for run in runs), f"{ratio:.2f} times the plain loop"
    return judged(met, said, ("a step", "tokens/s", "peak GiB", "MFU"), [run.row() for run in runs])


def _ratios(runs: Sequence[Run]) -> list[float]:
    """Of each of our runs to the loop's of the same name, where both fit."""
    loops = {run.name.partition(", ")[2]: run for run in runs if run.name.startswith("plain loop")}
    pairs = ((run, loops.get(run.name.partition(", ")[2])) for run in runs)
    return [
        ours.tokens_per_s / loop.tokens_per_s
        for ours, loop in pairs
        if loop and ours is not loop and ours.tokens_per_s and loop.tokens_per_s
    ]


def measure(size: Size, machine: Machine) -> list[Run]:
    """Ours and the plain loop, in turns: with all activations kept, and with blocks recomputed. On
    a GPU ours with compiled blocks too, for which the loop has no counterpart."""
    made = random_rows(size.rows, size.config["vocab_size"])
    operations = operations_of(size, made)
    runs = []
    for recomputed in (False, True):
        ways: dict[str, Callable[[], Callable[[], Any]]] = {
            "tracegrad": lambda r=recomputed: _ours(size, made, machine, r),  # type: ignore[misc]
            "plain loop": lambda r=recomputed: _plain(size, made, machine, r),  # type: ignore[misc]
        }
        for name, start in ways.items():
            words = "blocks recomputed" if recomputed else "all activations kept"
            named = f"{name}, {size.name}, {words}"
            runs.append(_measured(named, start, sum(size.rows), operations, machine))
    if machine.is_gpu:
        runs.append(
            _measured(
                f"tracegrad, {size.name}, blocks compiled",
                lambda: _ours(size, made, machine, False, compile=True),
                sum(size.rows),
                operations,
                machine,
            )
        )
    return runs


def _measured(
    name: str,
    start: Callable[[], Callable[[], Any]],
    tokens: int,
    operations: float,
    machine: Machine,
) -> Run:
    _free(machine)  # of the run before: one that did not fit leaves its cycles behind
    if machine.is_gpu:
        torch.cuda.reset_peak_memory_stats(machine.device)
    try:
        step = start()
        step()
        machine.wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        machine.wait()
        seconds = (time.perf_counter() - began) / STEPS
    except torch.OutOfMemoryError:
        return Run(name, None, None, None)
    peak = peak_flops(machine.device, torch.bfloat16)
    return Run(
        name,
        tokens / seconds,
        torch.cuda.max_memory_allocated(machine.device) / 2**30 if machine.is_gpu else None,
        operations / seconds / peak if peak else None,
    )


def _free(machine: Machine) -> None:
    gc.collect()  # models hold themselves in cycles
    if machine.is_gpu:
        torch.cuda.empty_cache()


def our_learner(size: Size, machine: Machine, **settings: Any) -> Learner:
    """In a process group of its own; bfloat16 unless `settings` say otherwise."""
    given = {"compute_dtype": "bfloat16", "reshard": False} | settings
    fsdp = FsdpSettings.model_validate({"device": machine.fsdp_device, **given})
    destroy_process_group()
    mesh = init_process_group(fsdp)
    varlen = machine.is_gpu and given["compute_dtype"] == "bfloat16"
    attention = "tracegrad_varlen" if varlen else "tracegrad_packed"
    model = shard(prepare_model(random_model(size, attention), fsdp), mesh, fsdp)
    return Learner(model, mesh, preset("grpo"), OptimSettings(lr=1e-6), reshard=fsdp.reshard)


def _ours(
    size: Size, made: Sequence[Row], machine: Machine, recomputed: bool, **settings: Any
) -> Callable[[], Any]:
    learner = our_learner(size, machine, gradient_checkpointing=recomputed, **settings)
    (batches,) = pack(made, ranks=1, budget=size.budget)
    return lambda: learner.train(batches, version=0)


def _plain(
    size: Size, made: Sequence[Row], machine: Machine, recomputed: bool
) -> Callable[[], Any]:
    """A row at a time, all logits, autocast, AdamW: what anybody would write first."""
    device = machine.device
    model: Any = random_model(size, "sdpa").to(device)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    targets = sum(int(row.keep.sum()) for row in made)

    def step() -> None:
        for row in made:
            ids = torch.from_numpy(row.input_ids).long().to(device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[1:, None])[:, 0]
            ratio = torch.exp(logp - logp.detach())
            torch.autograd.backward(-ratio.sum() / targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def operations_of(size: Size, made: Sequence[Row]) -> float:
    """Floating-point operations of a step."""
    with torch.device("meta"):
        model = random_model(size, "sdpa")
    (batches,) = pack(made, ranks=1, budget=size.budget)
    return sum(flops(model, batch) for batch in batches)

"""How fast a step is: a dense model of 0.6B and one of 1.7B with 16k tokens, beside the plainest
PyTorch loop on the same rows. Goals: for each 40 % of the device's peak, and 1.0 times the loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu_check.check import Finding, Machine, in_a_line, judged
from bench.gpu_check.models import LARGE, LARGER, TINY, Size, random_model, random_rows
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.engine import FsdpSettings, Learner, OptimSettings, shard
from tracegrad_trainer.engine.distributed import destroy_process_group, init_process_group
from tracegrad_trainer.engine.flops import flops
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.engine.peak_flops import peak_flops
from tracegrad_trainer.losses import preset

OURS, LOOP = "tracegrad", "plain loop"
STEPS = 3  # measured, after one that is not
GOAL_MFU, GOAL_RATIO = 0.4, 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """One way to take a step. None: not known of this device, or, with an `error`, of this run."""

    way: str  # whose step it is
    size: str
    how: str
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    mfu: float | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.way}, {self.size}, {self.how}"

    def row(self) -> list[str]:
        if self.tokens_per_s is None:
            return [self.name, self.error, "", ""]
        peak = "–" if self.peak_gib is None else f"{self.peak_gib:.1f}"
        mfu = "–" if self.mfu is None else f"{self.mfu:.1%}"
        return [self.name, f"{self.tokens_per_s:,.0f}", peak, mfu]


def check(machine: Machine) -> Finding:
    sizes = [TINY] if machine.tiny else [LARGE, LARGER]
    runs: list[Run] = []
    try:
        for size in sizes:
            runs += measure(size, machine)
        if machine.is_gpu:  # last: what takes longest, and has the most to go wrong
            runs += [measure_compiled(size, machine) for size in sizes]
    finally:
        destroy_process_group()
    return judge_speed(runs, goals=machine.is_gpu and not machine.tiny)


def judge_speed(runs: Sequence[Run], *, goals: bool) -> Finding:
    """Right: each way of ours takes its steps, and with `goals`, which are a GPU's, each size has
    one with the MFU that is wanted, and each that the loop can take too is as fast as the loop."""
    ours = [run for run in runs if run.way == OURS]
    failed = [run.name for run in ours if run.error]
    ratio = min(_ratios(runs), default=0.0)
    said, met = [], not failed
    for size in dict.fromkeys(run.size for run in ours) if goals else ():
        best = max((run for run in ours if run.size == size), key=lambda run: run.mfu or 0.0)
        met = met and (best.mfu or 0.0) >= GOAL_MFU
        said.append(f"MFU of {size} {best.mfu or 0.0:.1%} ({best.how}; goal {GOAL_MFU:.0%})")
    met = met and (ratio >= GOAL_RATIO or not goals)
    said.append(f"{ratio:.2f} times the plain loop at least")
    said += [f"failed: {'; '.join(failed)}"] if failed else []
    header = ("a step", "tokens/s", "peak GiB", "MFU")
    return judged(met, ", ".join(said), header, [run.row() for run in runs])


def _ratios(runs: Sequence[Run]) -> list[float]:
    """Of each of our runs to the loop's of the same kind, where both fit."""
    loops = {(run.size, run.how): run for run in runs if run.way == LOOP}
    pairs = [(run, loops.get((run.size, run.how))) for run in runs if run.way == OURS]
    return [
        ours.tokens_per_s / loop.tokens_per_s
        for ours, loop in pairs
        if loop and ours.tokens_per_s and loop.tokens_per_s
    ]


def measure(size: Size, machine: Machine) -> list[Run]:
    """Ours and the plain loop, in turns: with all activations kept, and with blocks recomputed."""
    made = random_rows(size.rows, size.config["vocab_size"])
    runs = []
    for recomputed in (False, True):
        ways: dict[str, Callable[[], Callable[[], Any]]] = {
            OURS: lambda r=recomputed: _ours(size, made, machine, r),  # type: ignore[misc]
            LOOP: lambda r=recomputed: _plain(size, made, machine, r),  # type: ignore[misc]
        }
        how = "blocks recomputed" if recomputed else "all activations kept"
        for way, start in ways.items():
            runs.append(_measured(Run(way, size.name, how), start, size, made, machine))
    return runs


def measure_compiled(size: Size, machine: Machine) -> Run:
    """Ours with compiled blocks, for which the loop has no counterpart."""
    made = random_rows(size.rows, size.config["vocab_size"])
    run = Run(OURS, size.name, "blocks compiled")
    start = partial(_ours, size, made, machine, False, compile=True)
    return _measured(run, start, size, made, machine)


def _measured(
    run: Run,
    start: Callable[[], Callable[[], Any]],
    size: Size,
    made: Sequence[Row],
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
        return replace(run, error="does not fit")
    except Exception as error:
        return replace(run, error=in_a_line(error))
    peak = peak_flops(machine.device, torch.bfloat16)
    return replace(
        run,
        tokens_per_s=sum(size.rows) / seconds,
        peak_gib=torch.cuda.max_memory_allocated(machine.device) / 2**30
        if machine.is_gpu
        else None,
        mfu=operations_of(size, made) / seconds / peak if peak else None,
    )


def _free(machine: Machine) -> None:
    gc.collect()  # models hold themselves in cycles
    if machine.is_gpu:
        torch.cuda.empty_cache()


def our_learner(size: Size, machine: Machine, *, lr: float = 1e-6, **settings: Any) -> Learner:
    """In a process group of its own; bfloat16 unless `settings` say otherwise."""
    given = {"compute_dtype": "bfloat16", "reshard": False} | settings
    fsdp = FsdpSettings.model_validate({"device": machine.fsdp_device, **given})
    destroy_process_group()
    mesh = init_process_group(fsdp)
    varlen = machine.is_gpu and given["compute_dtype"] == "bfloat16"
    attention = "tracegrad_varlen" if varlen else "tracegrad_packed"
    # With offloading the weights stay on the host.
    where = torch.device("cpu") if fsdp.cpu_offload else machine.device
    model = shard(prepare_model(random_model(size, attention, where), fsdp), mesh, fsdp)
    return Learner(model, mesh, preset("grpo"), OptimSettings(lr=lr), reshard=fsdp.reshard)


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
    model: Any = random_model(size, "sdpa", device)
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
    model = random_model(size, "sdpa", "meta")
    (batches,) = pack(made, ranks=1, budget=size.budget)
    return sum(flops(model, batch) for batch in batches)

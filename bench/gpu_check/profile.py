"""What a step's time goes to: the kernels that take most of it, and how long the device waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from bench.gpu_check.check import Finding, Machine
from bench.gpu_check.models import LARGE, TINY, random_rows
from bench.gpu_check.speed import our_learner
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine import destroy_process_group

SHOWN = 12


def check(machine: Machine) -> Finding:
    size = TINY if machine.tiny else LARGE
    made = random_rows(size.rows, size.config["vocab_size"])
    (batches,) = pack(made, ranks=1, budget=size.budget)
    kinds = [ProfilerActivity.CPU]
    if machine.is_gpu:
        kinds.append(ProfilerActivity.CUDA)
    try:
        learner = our_learner(size, machine)
        learner.train(batches, version=0)
        machine.wait()
        with profile(activities=kinds) as seen:
            began = time.perf_counter()
            learner.train(batches, version=0)
            machine.wait()
            seconds = time.perf_counter() - began
    finally:
        destroy_process_group()
    events = _at_work(seen.key_averages(), on_gpu=machine.is_gpu)

    def own(event: Any) -> float:
        micros = event.self_device_time_total if machine.is_gpu else event.self_cpu_time_total
        return float(micros) / 1e6

    ordered = sorted(events, key=own, reverse=True)
    busy = sum(map(own, events))
    rows = [
        [event.key[:70], str(event.count), f"{own(event):.4f}", f"{own(event) / seconds:.1%}"]
        for event in ordered[:SHOWN]
    ]
    seen.export_chrome_trace(str(machine.folder / "step.json"))
    said = f"a step of {seconds:.3f} s, the device at work for {min(busy / seconds, 1):.0%} of it"
    return Finding(
        verdict="right" if busy > 0 else "wrong",
        said=said,
        header=("kernel", "calls", "s", "of the step"),
        rows=rows,
    )


def _at_work(events: Iterable[Any], *, on_gpu: bool) -> list[Any]:
    """Those whose own times add up. On a GPU the kernels alone: the operators that started them
    have the same time once more, and so have the ranges that somebody named."""
    if not on_gpu:
        return list(events)
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]

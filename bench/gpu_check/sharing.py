"""vLLM and the trainer on the same GPUs in turn: vLLM sleeps, takes new weights into its sleep, and
wakes with them; a push that is refused leaves what was served. At both levels of sleep, and, where
there are two GPUs, divided between them too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.check import Finding, Machine, in_a_line, judged
from bench.gpu_check.pushes import named, whole_model
from bench.trainer.served_precision import (
    load_small,
    perturbed,
    save_small_model,
    served_gap,
    small_engine,
)
from tracegrad_trainer.inference.control_routes import PushError, SleepLevel, VllmControl
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.losses.logprob_gap import served_precision

HEADER = ("engine", "MiB freed by sleep", "first push", "refused push", "the push behind it", "")
LEVELS: tuple[SleepLevel, ...] = (2, 1)  # the default first


def check(machine: Machine) -> Finding:
    """An engine for each number of GPUs; the pushing process is on the first one."""
    folder = machine.folder / "shared-model"
    shutil.rmtree(folder, ignore_errors=True)
    save_small_model(folder)
    gpus = torch.cuda.device_count() if machine.is_gpu else 0
    rows: list[list[str]] = []
    for number in range(1, min(max(gpus, 1), 2) + 1):
        try:
            rows += _on_gpus(number, machine, folder)
        except Exception as error:
            rows.append([f"on {number} GPUs", "", "", "", "", in_a_line(error)])
    return judge_sharing(rows, frees=machine.is_gpu)


def judge_sharing(rows: list[list[str]], *, frees: bool) -> Finding:
    """Right: each sleep frees memory, where it is a GPU's, and after each push vLLM serves what it
    should, that is after the refused one what it served before."""
    wrong = [
        name
        for name, freed, *served, note in rows
        if served != ["within"] * 3 or note or (frees and not (freed and int(freed) > 0))
    ]
    said = f"{len(rows) - len(wrong)} of {len(rows)} sleeps end with the weights that were pushed"
    said += f", not {'; '.join(wrong)}" if wrong else ""
    return judged(not wrong, said, HEADER, rows)


def _on_gpus(number: int, machine: Machine, folder: Path) -> list[list[str]]:
    state = machine.folder / f"shared-state-{number}"
    shutil.rmtree(state, ignore_errors=True)
    settings = small_engine("bfloat16" if machine.is_gpu else "float32", folder, state).model_copy(
        update={"sleep_mode": True, "tensor_parallel": number}
    )
    rows = []
    with VllmProcess(settings, list(range(number)) if machine.is_gpu else None) as engine:
        engine.wait_healthy()
        for turn, level in enumerate(LEVELS):
            name = f"on {number} GPU{'s' if number > 1 else ''}, sleep level {level}"
            try:
                rows.append([name, *_slept(settings, folder, machine, level, 3 * turn)])
            except Exception as error:
                rows.append([name, "", "", "", "", in_a_line(error)])
    return rows


def _slept(
    settings: Any, folder: Path, machine: Machine, level: SleepLevel, version: int
) -> list[str]:
    """Three pushes after `version`, the second of them without its first block."""
    allowed = served_precision(settings.serving_dtype, on_cpu=settings.on_cpu)
    models = [perturbed(load_small(folder), version + i) for i in (1, 2, 3)]
    first, second, third = models
    take: Callable[[int, Any], None] = lambda version, model: None  # noqa: E731
    control: Callable[[str, float], VllmControl] = VllmControl
    if machine.is_gpu:
        engine_devices = [torch.device("cuda", i) for i in range(settings.tensor_parallel)]
        control, take = whole_model(settings, engine_devices[0], engine_devices)

    def served(wanted: Any) -> str:
        return served_gap(settings.url, wanted, allowed)[1]

    def verify(wanted: Any) -> None:
        if (said := served(wanted)) != "within":
            raise PushError(said)

    with WeightPusher(
        settings.url,
        version=version,
        checkpoint=folder,
        transport=control,
        timeout_s=120,
        sleep=SleepSettings(level, settings.socket.parent),
    ) as pusher:

        def push(number: int, model: Any, wanted: Any) -> int:
            before = _free(machine)
            pusher.stop_engine()
            freed = _free(machine) - before
            take(number, model)
            pusher.push(number, named(model), partial(verify, wanted))
            return freed

        freed = push(version + 1, first, first)
        found = [served(first)]
        stale = perturbed(load_small(folder), version + 2)
        stale.model.layers[0].load_state_dict(first.model.layers[0].state_dict())
        try:
            push(version + 2, stale, second)
            found.append("served")
        except PushError:
            found.append(served(first) if pusher.version == version + 1 else "lost")
        push(version + 3, third, third)
        found.append(served(third))
    return [str(freed >> 20) if machine.is_gpu else "–", *found, ""]


def _free(machine: Machine) -> int:
    return torch.cuda.mem_get_info(machine.device)[0] if machine.is_gpu else 0

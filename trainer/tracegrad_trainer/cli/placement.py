"""`trainer serve --dry-run`: who would be on which GPU, with how much memory, and why."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.text import Text

from tracegrad.events import Json
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.machine import GIB, describe_machine
from tracegrad_trainer.launch.placement import GpuPlan, Placement, gpu_words
from tracegrad_trainer.launch.resolve_gpus import plan_serve, with_placement
from tracegrad_trainer.rl.preflight import check_precision, describe_precision
from tracegrad_trainer.utils.console import plain_table, print_json, print_report

_MODELS = ("model", "reference")  # settings


def show_plan(
    settings: TrainerSettings,
    console: Console,
    *,
    described: str | None,
    as_json: bool,
    models: Mapping[str, str] | None = None,
) -> None:
    """`described`: GPUs of a machine that is not this one (`8x80GiB`). `models`: names of folders
    that are there for the plan alone.

    Raises:
        ValueError: it does not fit, [gpus] or what is served in fp8 is wrong, or no machine is
            described.
    """
    machine = None if described is None else describe_machine(described)
    if machine is not None:
        settings = _for_gpus(settings)
    check_precision(settings)
    placement = plan_serve(settings, machine)
    resolved = with_placement(settings, placement)
    if as_json:
        stored = _with_names(resolved.stored(), models or {})
        print_json({"settings": stored, "placement": placement_as_json(placement)})
    else:
        print_report(Group(render_placement(placement), describe_precision(resolved)), console)


def _with_names(stored: Json, models: Mapping[str, str]) -> Json:
    vllm = stored["vllm"]
    named = {name: models.get(str(stored.get(name)), stored.get(name)) for name in _MODELS}
    return {**stored, **named, "vllm": {**vllm, "model": models.get(vllm["model"], vllm["model"])}}


def _for_gpus(settings: TrainerSettings) -> TrainerSettings:
    """As they would be on another machine: what `auto` means here says nothing there."""
    there = {"device": "cuda"}
    vllm, fsdp = settings.vllm, settings.fsdp
    return settings.with_changes(
        vllm=vllm.model_copy(update=there) if vllm.device == "auto" else vllm,
        fsdp=fsdp.model_copy(update=there) if fsdp.device == "auto" else fsdp,
    )


def placement_line(placement: Placement) -> str:
    """The plan in one line."""
    trained = f"{placement.ranks} rank{'s' * (placement.ranks > 1)}"
    size, copies = placement.tensor_parallel, placement.data_parallel
    engines = "" if size * copies == 1 else f" (tensor_parallel {size}, data_parallel {copies})"
    if placement.shared:
        where = _on(placement.engine_gpus)
        return f"placement: vLLM{engines} and {trained} share {where}; vLLM sleeps during steps"
    serves, trains = _on(placement.engine_gpus), _on(placement.train_gpus)
    if placement.attached:
        return f"placement: {trained} on {trains}; vLLM runs already"
    return f"placement: vLLM{engines} on {serves}, {trained} on {trains}"


def placement_lines(placement: Placement) -> list[str]:
    """And why, where there was something to choose."""
    reasons = placement.reasons if placement.gpus else ()
    return [placement_line(placement), *(f"- {reason}" for reason in reasons)]


def _on(gpus: tuple[int, ...]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {gpu_words(gpus)}" if gpus else "the CPU"


def render_placement(placement: Placement) -> RenderableType:
    parts: list[RenderableType] = [Text(placement_line(placement), style="bold")]
    if placement.gpus:
        parts += [Text(), _gpus(placement)]
    table = plain_table("host memory", "GiB")
    for name, count in placement.host.items():
        table.add_row(name, _gib(count))
    used = sum(placement.host.values())
    table.add_row("all", _gib(used))
    table.add_row("free now", _gib(placement.host_free))
    parts += [Text(), table, Text()]
    parts += [Text(f"- {reason}") for reason in placement.reasons]
    note = "activations are good to a factor of two; `trainer settings` prints all settings"
    return Group(*parts, Text(), Text(note, style="dim"))


def _gpus(placement: Placement) -> RenderableType:
    """A row for GPUs that are used alike, and where vLLM sleeps one for each of the two states."""
    table = plain_table("GPU", "who", "memory, GiB", "used", "free", words=("who", "memory, GiB"))
    for _, alike in groupby(placement.gpus, key=_use):
        plans = list(alike)
        first, trains = plans[0], _ranks([plan.users[-1] for plan in plans if plan.users])
        rows = [(" + ".join([*first.users[:-1], trains]) or "idle", first.serving)]
        if first.serving != first.training:
            verb = "train" if len(plans) > 1 else "trains"
            rows = [("vLLM serves", first.serving), (f"{trains} {verb}", first.training)]
        for who, parts in rows:
            used = sum(parts.values())
            listed = " + ".join(f"{name} {_gib(count)}" for name, count in parts.items())
            numbers = gpu_words([plan.gpu.index for plan in plans])
            name = f"{numbers} ({first.gpu.name}, {_gib(first.gpu.total)} GiB)"
            table.add_row(name, who, listed, _gib(used), _gib(first.gpu.free - used))
    return table


def _use(plan: GpuPlan) -> object:
    kind = [user.split()[0] for user in plan.users]
    return plan.gpu.name, plan.gpu.total, plan.gpu.free, kind, plan.serving, plan.training


def _ranks(users: list[str]) -> str:
    """`rank 0`, `ranks 0-2`; what is no rank once."""
    numbers = [int(user.split()[1]) for user in users if user.startswith("rank ")]
    if len(numbers) > 1:
        return f"ranks {gpu_words(numbers)}"
    return users[0] if users else ""


def placement_as_json(placement: Placement) -> Json:
    """Bytes throughout."""
    return {
        "engines": placement.engines,
        "train_gpus": placement.train_gpus,
        "shared": placement.shared,
        "attached": placement.attached,
        "ranks": placement.ranks,
        "tensor_parallel": placement.tensor_parallel,
        "data_parallel": placement.data_parallel,
        "kv_cache_bytes": placement.kv_cache_bytes,
        "gpu_memory_utilization": placement.gpu_memory_utilization,
        "kv_tokens": placement.kv_tokens,
        "gpus": [_gpu_as_json(plan) for plan in placement.gpus],
        "transport": placement.transport,
        "pushed": placement.pushed,
        "host": {"parts": dict(placement.host), "free": placement.host_free},
        "reasons": placement.reasons,
    }


def _gpu_as_json(plan: GpuPlan) -> Mapping[str, object]:
    gpu = plan.gpu
    return {
        "index": gpu.index,
        "name": gpu.name,
        "total": gpu.total,
        "free": gpu.free,
        "users": plan.users,
        "serving": dict(plan.serving),
        "training": dict(plan.training),
        "left": plan.left,
    }


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}"

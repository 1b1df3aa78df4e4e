"""The placement of a command's settings: worked out, and written into them.

The ranks, vLLM and later readers of run/settings.json see numbers, never what was left open.
"""

from __future__ import annotations

from dataclasses import replace

from tracegrad_trainer.config.gpus import GpuSettings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.machine import Machine, device_environment, read_gpus
from tracegrad_trainer.launch.placement import (
    Placement,
    PlacementRequest,
    gpu_words,
    place,
    place_training,
)


def read_machine() -> Machine:
    """This one. Raises ValueError: see `read_gpus`."""
    from tracegrad.host_memory import free_host_memory

    return Machine(read_gpus(), free_host_memory())


def plan_serve(settings: TrainerSettings, machine: Machine | None = None) -> Placement:
    """The placement of `trainer serve`; `machine`: one that is not this.

    Raises:
        ValueError: there is no such model, it does not fit, or [gpus] is wrong.
    """
    from tracegrad_trainer.launch.model_sizes import placement_request, read_sizes

    if machine is None:
        machine = read_machine()
    count = len(machine.gpus)
    request = placement_request(settings, gpus=count)
    return place(machine, read_sizes(settings, gpus=count), request)


def with_placement(settings: TrainerSettings, placement: Placement) -> TrainerSettings:
    """The settings with what was chosen, `ranks` too. On a CPU they are as they were."""
    if not (placement.engine_gpus or placement.train_gpus):
        return settings
    gpus: dict[str, object] = {}
    changes = {"ranks": placement.ranks}
    if placement.train_gpus:
        gpus["train"] = gpu_words(placement.train_gpus)
    if placement.engine_gpus:
        gpus["vllm"] = gpu_words(placement.engine_gpus)
        vllm = settings.vllm.model_copy(
            update={
                "tensor_parallel": placement.tensor_parallel,
                "data_parallel": placement.data_parallel,
                "kv_cache_memory_bytes": placement.kv_cache_bytes,
                "gpu_memory_utilization": placement.gpu_memory_utilization,
                "max_num_seqs": settings.vllm.sequences,
            }
        )
        changes |= {"vllm": vllm}  # type: ignore[dict-item]
    if placement.sleep_level is not None:
        gpus["sleep_level"] = placement.sleep_level
    made = GpuSettings.model_validate(
        settings.gpus.model_dump() | gpus | {"share": placement.shared}
    )
    push = settings.push.model_copy(update={"transport": placement.transport})
    return settings.with_changes(**changes, gpus=made, push=push)


def with_training_gpus(settings: TrainerSettings) -> TrainerSettings:
    """The settings of a command that trains without vLLM: the GPUs that are named, or all.

    Raises:
        ValueError: they contradict each other, or the machine.
    """
    gpus = read_gpus()
    if not gpus and settings.gpus == GpuSettings():
        return settings
    request = PlacementRequest(
        train=settings.gpus.train_gpus,
        ranks=settings.ranks if "ranks" in settings.model_fields_set else None,
        train_on_gpu=settings.fsdp.device != "cpu",
        rank_multiple=settings.fsdp.rank_multiple,
    )
    if not gpus:  # then none of [gpus] can be meant
        request = replace(request, vllm=settings.gpus.vllm_gpus, share=settings.gpus.share)
    train = place_training(Machine(gpus, 0), request)
    if not train:
        return settings
    device_environment(train)
    ours = {"vllm": None, "share": None, "train": gpu_words(train)}
    made = GpuSettings.model_validate(settings.gpus.model_dump() | ours)
    return settings.with_changes(ranks=len(train), gpus=made)

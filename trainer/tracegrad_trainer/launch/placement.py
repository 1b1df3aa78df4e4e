"""Which GPUs vLLM serves on and which train, chosen by number of GPUs and the model's size.

`place` is pure: a machine, a model's sizes and what the settings fix go in, a plan with its reasons
comes out. The rule is in docs/gpus.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tracegrad_trainer.config.push_transport import Transport
from tracegrad_trainer.launch.engine_layout import EngineLayout, check_engine, fit_engine
from tracegrad_trainer.launch.gpu_splits import (
    Split,
    all_ranks,
    check_request,
    gpu_words,
    splits,
    usable,
)
from tracegrad_trainer.launch.machine import Gpu, Machine
from tracegrad_trainer.launch.placement_inputs import (
    CONTEXT,
    PROCESS,
    RESERVE,
    WORKSPACE,
    ModelSizes,
    PlacementRequest,
    RankMemory,
    in_gib,
    listed,
    push_buffers,
    room_of,
)
from tracegrad_trainer.launch.placement_reasons import placement_reasons

__all__ = [
    "AND",
    "RESERVE",
    "DoesNotFitError",
    "GpuPlan",
    "ModelSizes",
    "Placement",
    "PlacementRequest",
    "RankMemory",
    "gpu_words",
    "place",
    "place_training",
]

# What is advised where longer sequences do not fit.
SHORT = 8192
# Between the names of settings that are changed together.
AND = " and "


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Bytes by part, while vLLM serves (`serving`) and while the ranks work (`training`): the same
    in both, unless vLLM sleeps meanwhile."""

    gpu: Gpu
    users: tuple[str, ...]
    serving: Mapping[str, int]
    training: Mapping[str, int]

    @property
    def used(self) -> int:
        return max(sum(self.serving.values()), sum(self.training.values()))

    @property
    def left(self) -> int:
        return self.gpu.free - self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who is where. Without GPUs everything is in the host's memory.

    `kv_cache_bytes` and `gpu_memory_utilization` are what vLLM is given, of each GPU; None: the
    settings say nothing and need not (a CPU)."""

    engine_gpus: tuple[int, ...]
    train_gpus: tuple[int, ...]
    shared: bool
    ranks: int
    tensor_parallel: int
    data_parallel: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float | None
    kv_tokens: int | None  # that the cache of one engine holds
    gpus: tuple[GpuPlan, ...]
    host: Mapping[str, int]
    host_free: int
    transport: Transport  # of pushes
    pushed: int  # bytes of the files of a weight push, of two versions
    attached: bool  # vLLM runs already: none of this is its
    sleep_level: Literal[1, 2] | None  # None: vLLM does not sleep
    reasons: tuple[str, ...]

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each copy of the model that serves."""
        size = self.tensor_parallel
        return tuple(self.engine_gpus[i : i + size] for i in range(0, len(self.engine_gpus), size))

    @property
    def train_free(self) -> int | None:
        """Bytes that are free on each GPU that trains; None: it is done on the CPU."""
        free = [plan.gpu.free for plan in self.gpus if plan.gpu.index in self.train_gpus]
        return min(free, default=None)


class DoesNotFitError(ValueError):
    """Nothing fits; the numbers, and what would."""


def place(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> Placement:
    """The plan.

    Raises:
        ValueError: the request contradicts itself or the machine; names the field and the fix.
        DoesNotFitError: a ValueError too: no way to lay the model out has room.
    """
    check_request(machine, request)
    if request.engine_on_gpu and machine.gpus:
        check_engine(len(machine.gpus), sizes, request)
    if not machine.gpus or not (request.engine_on_gpu or request.train_on_gpu):
        return _assemble(machine, sizes, request, Split((), (), False), None)
    refused: dict[bool, _Refusal] = {}
    for split in splits(machine, request):
        found = _plan(machine, sizes, request, split)
        if isinstance(found, Placement):
            return found
        if found.tells_more_than(refused.get(split.shared), split):
            refused[split.shared] = found
    raise DoesNotFitError(_why_not(machine, sizes, request, refused))


def place_training(machine: Machine, request: PlacementRequest) -> tuple[int, ...]:
    """GPUs of ranks that train without vLLM: those that are named, or all; none on a CPU.

    Raises:
        ValueError: as `place`.
    """
    check_request(machine, request)
    if not machine.gpus or not request.train_on_gpu:
        return ()
    return request.train or all_ranks(usable(machine, request), request)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a split has no room; `reached`: 0 vLLM, 1 the ranks, 2 the host's memory."""

    reached: int
    why: str

    def tells_more_than(self, other: _Refusal | None, split: Split) -> bool:
        """Whoever gets furthest with the most GPUs: apart, the ranks have more and more."""
        if other is None or self.reached != other.reached:
            return other is None or self.reached > other.reached
        return self.reached > 0 and not split.shared


def _plan(
    machine: Machine, sizes: ModelSizes, request: PlacementRequest, split: Split
) -> Placement | _Refusal:
    """The plan of a split, or why it has no room."""
    layout = None
    if split.engine:
        gpus = [machine.gpus[n] for n in split.engine]
        beside = sizes.ranks[len(split.train)].between_steps if split.shared else 0
        found = fit_engine(gpus, sizes, request, beside, _buffers(sizes, request, split))
        if isinstance(found, str) and not request.transport_asked:
            request = replace(request, transport="files")
            found = fit_engine(gpus, sizes, request, beside, _buffers(sizes, request, split))
        if isinstance(found, str):
            return _Refusal(0, found)
        layout = found
        filled = found.tensor_parallel * found.data_parallel
        idle = split.engine[filled:]
        if idle and split.shared:
            return _Refusal(0, f"{len(gpus)} GPUs hold no whole number of engines of {filled}")
        train = split.train
        if request.vllm is None and request.train is None and request.ranks is None and train:
            more = len(idle) // request.rank_multiple * request.rank_multiple
            train = idle[len(idle) - more :] + train  # what no engine can use trains
        split = Split(split.engine[:filled], train, split.shared)
    if short := _training_room(machine, sizes, split, layout):
        return _Refusal(1, short)
    placement = _assemble(machine, sizes, request, split, layout)
    if sum(placement.host.values()) <= machine.host:
        return placement
    may_lose = not (request.sleep_level_asked or sizes.beside)
    if split.shared and request.sleep_level == 1 and may_lose:
        return _plan(machine, sizes, replace(request, sleep_level=2), split)
    why = (
        f"about {in_gib(sum(placement.host.values()))} of the host's memory"
        f" ({listed(placement.host)}), and {in_gib(machine.host)} are free"
    )
    return _Refusal(2, why)


def _training_room(
    machine: Machine, sizes: ModelSizes, split: Split, layout: EngineLayout | None
) -> str | None:
    """Why the ranks have no room on their GPUs."""
    if not split.train:
        return None
    rank = sizes.ranks[len(split.train)]
    asleep = layout.workspace if split.shared and layout else 0
    room = min(room_of(machine.gpus[n]) for n in split.train)
    if rank.peak + asleep <= room:
        return None
    beside = f" beside {in_gib(asleep)} of a sleeping vLLM" if asleep else ""
    return (
        f"a rank of {len(split.train)} needs {in_gib(rank.peak)}"
        f" ({listed(_rank_parts(rank))}){beside}, and has {in_gib(room)}"
    )


def _assemble(
    machine: Machine,
    sizes: ModelSizes,
    request: PlacementRequest,
    split: Split,
    layout: EngineLayout | None,
) -> Placement:
    """Whether it fits the CPU, where something is there, is checked by `check_fits_memory`."""
    ranks = len(split.train) or request.ranks or 1
    size = layout.tensor_parallel if layout else request.tensor_parallel or 1
    copies = layout.data_parallel if layout else request.data_parallel or 1
    share, kv = request.gpu_memory_utilization, request.kv_cache_bytes or 0
    tokens = kv * size // max(1, sizes.kv_bytes)
    if layout:
        kv, tokens = layout.kv, layout.tokens
        share = share or layout.share_of([machine.gpus[n] for n in split.engine])
    return Placement(
        engine_gpus=split.engine,
        train_gpus=split.train,
        shared=split.shared,
        ranks=ranks,
        tensor_parallel=size,
        data_parallel=copies,
        kv_cache_bytes=kv or None,
        gpu_memory_utilization=share if layout else None,
        kv_tokens=tokens,
        gpus=tuple(
            _gpu_plan(gpu, sizes, split, layout, _buffers(sizes, request, split)(size))
            for gpu in machine.gpus
        ),
        transport=request.transport,
        host=_host_parts(sizes, request, split, (ranks, size, copies)),
        host_free=machine.host,
        pushed=sizes.pushed,
        attached=not request.engine_here,
        sleep_level=request.sleep_level if split.shared else None,
        reasons=tuple(placement_reasons(machine, sizes, request, split, layout)),
    )


def _buffers(sizes: ModelSizes, request: PlacementRequest, split: Split) -> Callable[[int], int]:
    """Of a push, by how many GPUs a copy of the model has."""
    ranks, shared = len(split.train), split.shared
    return lambda size: push_buffers(sizes, request, size, ranks=ranks, shared=shared)


def _gpu_plan(
    gpu: Gpu, sizes: ModelSizes, split: Split, layout: EngineLayout | None, buffers: int
) -> GpuPlan:
    """`buffers`: of a push, on each of vLLM's GPUs."""
    users = ["vLLM"] if gpu.index in split.engine else []
    serving = _engine_parts(layout) if layout and users else {}
    if serving and buffers:
        serving |= {"a push's buffers": buffers}
    training: dict[str, int] = {}
    if gpu.index in split.train:
        users.append(f"rank {split.train.index(gpu.index)}")
        rank = sizes.ranks[len(split.train)]
        training = _rank_parts(rank)
        if layout and split.shared:
            serving |= _between_steps(rank)
            training |= {"vLLM asleep": layout.workspace}
    if not split.shared:
        serving = training = serving | training
    return GpuPlan(gpu=gpu, users=tuple(users), serving=serving, training=training)


def _engine_parts(layout: EngineLayout) -> dict[str, int]:
    return {
        "served weights": layout.weights,
        "KV cache": layout.kv,
        "vLLM's working memory": layout.workspace,
    }


def _rank_parts(rank: RankMemory) -> dict[str, int]:
    parts = {"context": CONTEXT}
    if not rank.offloaded:
        parts["state"] = rank.state
    return parts | {"gathered": rank.gathered, "activations": rank.activations}


def _between_steps(rank: RankMemory) -> dict[str, int]:
    """What is left of a rank while vLLM serves, and what it needs to check a push."""
    parts = {"context": CONTEXT}
    if not rank.offloaded:
        parts["state without gradients"] = rank.state - rank.gradients
    return parts | {"gathered": rank.gathered}


def _host_parts(
    sizes: ModelSizes, request: PlacementRequest, split: Split, sized: tuple[int, int, int]
) -> dict[str, int]:
    """`sized`: ranks, tensor_parallel, data_parallel. What has no GPU is here as well."""
    ranks, size, copies = sized
    rank = sizes.ranks[ranks]
    copies = copies if request.engine_here else 0
    parts = {
        "processes": PROCESS * (ranks + size * copies),
        "loading or a checkpoint's copy": ranks * rank.host,
    }
    if sizes.pushed_to_memory:
        parts["files of a weight push"] = sizes.pushed
    if not split.train:
        parts["state"] = ranks * rank.state
        parts["gathered"] = ranks * rank.gathered
        parts["activations"] = ranks * rank.activations
    elif rank.offloaded:
        parts["offloaded state"] = ranks * rank.state
    if not split.engine and copies:
        parts["served weights"] = copies * sizes.served
        parts["KV cache"] = size * copies * (request.kv_cache_bytes or 0)
    elif split.shared:  # vLLM 0.32 keeps its graphs' memory there at either level
        # Pinned memory comes in powers of two: up to twice what is asked for.
        kept = 2 * copies * sizes.served if request.sleep_level == 1 else 0
        parts["a sleeping vLLM"] = size * copies * WORKSPACE + kept
    return parts


def _why_not(
    machine: Machine, sizes: ModelSizes, request: PlacementRequest, refused: Mapping[bool, _Refusal]
) -> str:
    gpus = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}"
    least, most = (in_gib(how(gpu.free for gpu in machine.gpus)) for how in (min, max))
    each = f"{least} free each" if least == most else f"{least} to {most} free"
    kinds = ("apart", "shared")
    said = "; ".join(f"{kinds[shared]}, {one.why}" for shared, one in refused.items())
    line = (
        f"model: {sizes.parameters / 1e9:.2f}e9 parameters do not fit on {gpus} with"
        f" {each}: {said or '[gpus] leaves no way to lay it out'}"
    )
    would = _would_fit(machine, sizes, request)
    would += [f"out {name}" for name in _without(machine, sizes, request)]
    if would:
        return f"{line}. It would fit with{', or with'.join(would)}"
    single = [name for name in sizes.ways if AND not in name]
    host = bool(refused) and all(one.reached == 2 for one in refused.values())
    more = "a host with more memory" if host else "more or larger GPUs"
    return f"{line}. Not enough: {', '.join(single) or 'our settings'}; take {more}"


def _would_fit(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> list[str]:
    """Of the settings that would do those that change least."""
    ways = {name: replace(sizes, ranks=ranks) for name, ranks in sizes.ways.items()}
    if sizes.max_model_len > SHORT:
        ways[f"vllm.max_model_len = {SHORT}"] = replace(sizes, max_model_len=SHORT)
    if sizes.pushed_to_memory:
        ways["push.folder on a disk"] = replace(sizes, pushed_to_memory=False)

    found = [name for name, changed in ways.items() if _fits(machine, changed, request)]
    if request.sleep_level == 1 and _fits(machine, sizes, replace(request, sleep_level=2)):
        found.append("gpus.sleep_level = 2")
    least = min((name.count(AND) for name in found), default=0)
    return [f" {name}" for name in found if name.count(AND) == least]


def _without(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> list[str]:
    """Settings that are in the way: it would fit if one of them were left out."""
    fixed = {
        "[gpus]": replace(request, vllm=None, train=None, share=None),
        "ranks": replace(request, ranks=None),
        "vllm.tensor_parallel": replace(request, tensor_parallel=None),
        "vllm.data_parallel": replace(request, data_parallel=None),
        "vllm.kv_cache_memory_bytes": replace(request, kv_cache_bytes=None),
        "vllm.gpu_memory_utilization": replace(request, gpu_memory_utilization=None),
    }
    return [
        name for name, freed in fixed.items() if freed != request and _fits(machine, sizes, freed)
    ]


def _fits(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> bool:
    found = (_plan(machine, sizes, request, one) for one in splits(machine, request))
    return any(isinstance(one, Placement) for one in found)

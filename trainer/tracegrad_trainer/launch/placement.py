"""Which GPUs vLLM serves on and which train, chosen by number of GPUs and the model's size.

`place` is pure: a machine, a model's sizes and what the settings fix go in, a plan with its reasons
comes out. The rule is in docs/gpus.md. What vLLM needs beside weights and KV cache, and what a
process costs on a GPU, are assumptions (the constants below): no GPU was at hand to measure them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tracegrad_trainer.launch.machine import GIB, Gpu, Machine

# Of each GPU's memory, left to fragmentation and to what no estimate knows.
RESERVE = 0.05
# A process on a GPU: CUDA's context, cuBLAS's and NCCL's buffers.
CONTEXT = 1 * GIB
# vLLM beside weights and KV cache: one scheduled batch's activations, CUDA graphs; logits besides.
WORKSPACE = 2 * GIB
# A process's libraries in the host's memory.
PROCESS = 2 * GIB
# A KV cache is of use if it holds the longest sequence, and so many of this length.
USEFUL_SEQUENCES, USEFUL_TOKENS = 16, 4096
# At most every so manieth GPU trains, where that is enough: decoding takes most of a step's time.
TRAIN_SHARE = 4
# What is advised where longer sequences do not fit.
SHORT = 8192
# A part of the host's memory: two versions, as a push keeps them.
PUSH_FILES = "files of a weight push"
# Between the names of settings that are changed together.
AND = " and "


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank; `offloaded`: the state is in the host's memory."""

    state: int
    gathered: int
    activations: int
    host: int  # beside the state, while it loads or copies a checkpoint
    offloaded: bool = False

    @property
    def resident(self) -> int:
        """On its GPU all the time."""
        return CONTEXT + (0 if self.offloaded else self.state)

    @property
    def peak(self) -> int:
        return self.resident + self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a model takes. `ranks`: a rank's memory, by number of ranks from 1 up to the number of
    GPUs; `ways`: the same with settings that take less, by their names."""

    parameters: int
    served: int  # bytes of its weights in the served dtype
    kv_bytes: int  # of a token, in all layers and heads
    kv_heads: int  # into how many parts it can be divided
    heads: int
    vocabulary: int
    max_model_len: int
    pushed: int  # bytes of the files of a weight push
    ranks: Mapping[int, RankMemory]
    ways: Mapping[str, Mapping[int, RankMemory]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What the settings fix; None: to be chosen."""

    vllm: tuple[int, ...] | None = None
    train: tuple[int, ...] | None = None
    share: bool | None = None
    ranks: int | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 256
    engine_on_gpu: bool = True
    train_on_gpu: bool = True


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
    reasons: tuple[str, ...]

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each copy of the model that serves."""
        size = self.tensor_parallel
        return tuple(self.engine_gpus[i : i + size] for i in range(0, len(self.engine_gpus), size))

    @property
    def pushed(self) -> int:
        """Bytes of the files of a weight push, of two versions."""
        return self.host[PUSH_FILES]

    @property
    def train_free(self) -> int | None:
        """Bytes that are free on each GPU that trains; None: it is done on the CPU."""
        free = [plan.gpu.free for plan in self.gpus if plan.gpu.index in self.train_gpus]
        return min(free, default=None)


@dataclass(frozen=True, slots=True)
class _Split:
    """GPUs to be tried; `minimum`: the smallest possible vLLM takes only what it needs of them."""

    engine: tuple[int, ...]
    train: tuple[int, ...]
    shared: bool


@dataclass(frozen=True, slots=True)
class _Engine:
    tensor_parallel: int
    data_parallel: int
    weights: int
    workspace: int
    kv: int
    tokens: int


class DoesNotFitError(ValueError):
    """Nothing fits; the numbers, and what would."""


def place(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> Placement:
    """The plan.

    Raises:
        ValueError: the request contradicts itself or the machine; names the field and the fix.
        DoesNotFitError: a ValueError too: no way to lay the model out has room.
    """
    check_request(machine, request)
    if not machine.gpus or not (request.engine_on_gpu or request.train_on_gpu):
        return _on_cpu(machine, sizes, request)
    refused: dict[bool, str] = {}
    for split in _splits(machine, request):
        found = _try(machine, sizes, request, split)
        if isinstance(found, Placement):
            return found
        if not split.shared or True not in refused:  # of both kinds that of the most GPUs
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
    return request.train or _numbers(machine)[: request.ranks]


def check_request(machine: Machine, request: PlacementRequest) -> None:
    """Raises ValueError: see `place`."""
    there, ranks = len(machine.gpus), request.ranks
    lists = {"vllm": request.vllm, "train": request.train}
    given = [name for name, value in lists.items() if value is not None]
    given += ["share"] if request.share else []
    if given and not there:
        raise ValueError(
            f"gpus.{given[0]}: this machine has no GPU that could be used, vLLM and the ranks are"
            " on its CPU: leave [gpus] out"
        )
    for name, on_gpu in (("vllm", request.engine_on_gpu), ("train", request.train_on_gpu)):
        if lists[name] is not None and not on_gpu:
            device = "vllm.device" if name == "vllm" else "fsdp.device"
            raise ValueError(f"gpus.{name}: {device} puts it on the CPU: leave one of them out")
        for index in lists[name] or ():
            if index >= there:
                raise ValueError(
                    f"gpus.{name}: GPU {index} is not there: this machine has {there}, numbered"
                    f" from 0; name some of 0-{there - 1}"
                )
    if request.share and not (request.engine_on_gpu and request.train_on_gpu):
        raise ValueError("gpus.share: vLLM or the ranks are on the CPU: leave it out")
    if not there or not request.train_on_gpu or ranks is None:
        return
    if request.train is not None and len(request.train) != ranks:
        raise ValueError(
            f"ranks = {ranks}, but gpus.train = {_words(request.train)!r} names"
            f" {len(request.train)}: one rank trains on each GPU; leave ranks out"
        )
    if ranks > there:
        raise ValueError(
            f"ranks = {ranks}: this machine has {there} GPU{'s' * (there > 1)}, and one rank trains"
            f" on each: set ranks = {there}, or leave it out"
        )


def _splits(machine: Machine, request: PlacementRequest) -> Iterator[_Split]:
    """Ways to lay it out, the best first."""
    numbers = _numbers(machine)
    engine, train = request.vllm, request.train
    if not request.engine_on_gpu:
        yield from (_Split((), numbers[:n], False) for n in _rank_counts(request, numbers))
        return
    if not request.train_on_gpu:
        yield from (_Split(engine or numbers, (), False) for _ in range(1))
        return
    if not request.share:
        yield from _apart(numbers, request)
    if request.share is False or (engine and train and set(engine) != set(train)):
        return
    together = engine or train
    if together is not None:
        whole = request.share or set(together) == set(numbers)
        if whole and request.ranks in (None, len(together)):
            yield _Split(together, together, True)
        return
    counts = [request.ranks] if request.ranks else range(len(numbers), 0, -1)
    yield from (_Split(numbers[:n], numbers[:n], True) for n in counts)


def _apart(numbers: tuple[int, ...], request: PlacementRequest) -> Iterator[_Split]:
    """The fewest GPUs train: the last ones."""
    engine, train = request.vllm, request.train
    if engine is not None and train is not None:
        if not set(engine) & set(train):
            yield _Split(engine, train, False)
        return
    if train is not None:
        rest = tuple(n for n in numbers if n not in train)
        if rest:
            yield _Split(rest, train, False)
        return
    free = tuple(n for n in numbers if n not in (engine or ()))
    for count in _rank_counts(request, free, least=math.ceil(len(numbers) / TRAIN_SHARE)):
        rest = engine or free[: len(free) - count]
        if rest and count <= len(free):
            yield _Split(rest, free[len(free) - count :], False)


def _rank_counts(request: PlacementRequest, free: Sequence[int], least: int = 1) -> Sequence[int]:
    if request.ranks is not None:
        return [request.ranks]
    return range(min(least, max(1, len(free))), len(free) + 1)


def _try(
    machine: Machine, sizes: ModelSizes, request: PlacementRequest, split: _Split
) -> Placement | str:
    """The plan of a split, or why it has no room."""
    engine, train = split.engine, split.train
    idle = 0
    if engine:
        found = _fit_engine(machine, sizes, request, split)
        if isinstance(found, str):
            return found
        copies = found.tensor_parallel * found.data_parallel
        idle = len(engine) - copies
        if idle and split.shared:
            return f"{len(engine)} GPUs hold no whole number of engines of {copies}"
        if idle and request.vllm is None and request.train is None and request.ranks is None:
            train = engine[copies:] + train  # what no engine can use trains
        engine = engine[:copies]
    else:
        found = None
    rank = sizes.ranks[len(train)] if train else sizes.ranks[request.ranks or 1]
    if train and (short := _training_room(machine, rank, found, split, train)):
        return short
    placement = _assemble(machine, sizes, request, (engine, train, split.shared), found)
    wanted = sum(placement.host.values())
    if wanted > machine.host:
        return (
            f"about {_gib(wanted)} of the host's memory ({_listed(placement.host)}), and"
            f" {_gib(machine.host)} are free"
        )
    return placement


def _fit_engine(
    machine: Machine, sizes: ModelSizes, request: PlacementRequest, split: _Split
) -> _Engine | str:
    count = len(split.engine)
    room = min(_room(machine.gpus[n]) for n in split.engine)
    resident = sizes.ranks[len(split.train)].resident if split.shared else 0
    total = min(machine.gpus[n].total for n in split.engine)
    needed = _useful_tokens(sizes)
    if request.kv_cache_bytes or request.gpu_memory_utilization:
        needed = sizes.max_model_len  # as vLLM itself
    said = f"vLLM cannot be divided over {count} GPU{'s' * (count > 1)}"
    for size in _tensor_sizes(sizes, request, count):
        copies = request.data_parallel or count // size
        if not size <= size * copies <= count:
            continue
        weights = -(-sizes.served // size)
        workspace = CONTEXT + WORKSPACE + 12 * request.max_num_seqs * sizes.vocabulary // size
        left = room - resident - weights - workspace
        kv = left
        if request.kv_cache_bytes:
            kv = request.kv_cache_bytes
        elif request.gpu_memory_utilization:
            kv = int(request.gpu_memory_utilization * total) - weights - workspace
        a_token = -(-sizes.kv_bytes // min(size, sizes.kv_heads))
        if needed * a_token <= kv <= left:
            return _Engine(size, copies, weights, workspace, kv, kv // a_token)
        wanted = weights + workspace + max(kv if kv != left else 0, needed * a_token)
        beside = f" beside {_gib(resident)} of training state" if resident else ""
        said = (
            f"vLLM on {size} GPU{'s' * (size > 1)} needs {_gib(wanted)} of each (weights"
            f" {_gib(weights)}, working memory {_gib(workspace)}, a KV cache of {needed} tokens"
            f" {_gib(needed * a_token)}){beside}, and has {_gib(room)}"
        )
    return said


def _tensor_sizes(sizes: ModelSizes, request: PlacementRequest, count: int) -> list[int]:
    """Powers of two, that divide the heads, the smallest first."""
    if request.tensor_parallel is not None:
        return [request.tensor_parallel]
    powers = (1 << power for power in range(count.bit_length()))
    return [size for size in powers if size <= count and sizes.heads % size == 0]


def _training_room(
    machine: Machine,
    rank: RankMemory,
    engine: _Engine | None,
    split: _Split,
    train: tuple[int, ...],
) -> str | None:
    asleep = engine.workspace if split.shared and engine else 0
    room = min(_room(machine.gpus[n]) for n in train)
    if rank.peak + asleep <= room:
        return None
    beside = f" beside {_gib(asleep)} of a sleeping vLLM" if asleep else ""
    return (
        f"a rank of {len(train)} needs {_gib(rank.peak)} ({_listed(_rank_parts(rank))}){beside},"
        f" and has {_gib(room)}"
    )


def _assemble(
    machine: Machine,
    sizes: ModelSizes,
    request: PlacementRequest,
    who: tuple[tuple[int, ...], tuple[int, ...], bool],
    engine: _Engine | None,
) -> Placement:
    gpus, train, shared = who
    ranks = len(train) or request.ranks or 1
    rank = sizes.ranks[ranks]
    plans = []
    for gpu in machine.gpus:
        serving = _engine_parts(engine) if engine and gpu.index in gpus else {}
        training = _rank_parts(rank) if gpu.index in train else {}
        if serving and training:
            still = {name: training[name] for name in ("state", "context") if name in training}
            asleep = {"vLLM asleep": engine.workspace if engine else 0}
            serving, training = serving | still, training | asleep
        else:
            serving = training = serving | training
        users = ["vLLM"] * (gpu.index in gpus)
        users += [f"rank {i}" for i, index in enumerate(train) if index == gpu.index]
        plans.append(GpuPlan(gpu=gpu, users=tuple(users), serving=serving, training=training))
    copies = (engine.tensor_parallel, engine.data_parallel) if engine else (1, 1)
    total = min((machine.gpus[n].total for n in gpus), default=0)
    share = None
    if engine:
        used = engine.weights + engine.workspace + engine.kv
        share = math.floor(1000 * used / total) / 1000  # vLLM refuses to start on less than it
    return Placement(
        engine_gpus=gpus,
        train_gpus=train,
        shared=shared,
        ranks=ranks,
        tensor_parallel=copies[0],
        data_parallel=copies[1],
        kv_cache_bytes=engine.kv if engine else request.kv_cache_bytes,
        gpu_memory_utilization=share,
        kv_tokens=engine.tokens if engine else None,
        gpus=tuple(plans),
        host=_host_parts(sizes, rank, ranks, copies[0] * copies[1]),
        host_free=machine.host,
        reasons=tuple(_reasons(machine, sizes, request, (gpus, train, shared), engine)),
    )


def _engine_parts(engine: _Engine) -> dict[str, int]:
    return {
        "served weights": engine.weights,
        "KV cache": engine.kv,
        "vLLM's working memory": engine.workspace,
    }


def _rank_parts(rank: RankMemory) -> dict[str, int]:
    parts = {"context": CONTEXT}
    if not rank.offloaded:
        parts["state"] = rank.state
    return parts | {"gathered": rank.gathered, "activations": rank.activations}


def _host_parts(sizes: ModelSizes, rank: RankMemory, ranks: int, workers: int) -> dict[str, int]:
    parts = {
        "processes": PROCESS * (ranks + workers),
        "loading or a checkpoint's copy": ranks * rank.host,
        PUSH_FILES: sizes.pushed,
    }
    return parts | ({"offloaded state": ranks * rank.state} if rank.offloaded else {})


def _on_cpu(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> Placement:
    """Everything is where it always was; whether it fits is checked by `check_fits_memory`."""
    ranks = request.ranks or 1
    rank, copies = sizes.ranks[ranks], request.data_parallel or 1
    parallel = request.tensor_parallel or 1
    host = _host_parts(sizes, replace(rank, offloaded=False), ranks, parallel * copies)
    host |= {
        "state": ranks * rank.state,
        "gathered": ranks * rank.gathered,
        "activations": ranks * rank.activations,
        "served weights": copies * sizes.served,
        "KV cache": parallel * copies * (request.kv_cache_bytes or 0),
    }
    kv_tokens = (request.kv_cache_bytes or 0) * parallel // max(1, sizes.kv_bytes)
    why = "this machine has no GPU" if not machine.gpus else "vllm.device and fsdp.device say so"
    number = f"{ranks} rank{'s' * (ranks > 1)}"
    return Placement(
        engine_gpus=(),
        train_gpus=(),
        shared=False,
        ranks=ranks,
        tensor_parallel=parallel,
        data_parallel=copies,
        kv_cache_bytes=request.kv_cache_bytes,
        gpu_memory_utilization=None,
        kv_tokens=kv_tokens,
        gpus=tuple(GpuPlan(gpu=gpu, users=(), serving={}, training={}) for gpu in machine.gpus),
        host=host,
        host_free=machine.host,
        reasons=(f"vLLM and {number} on the CPU: {why}",),
    )


def _reasons(
    machine: Machine,
    sizes: ModelSizes,
    request: PlacementRequest,
    who: tuple[tuple[int, ...], tuple[int, ...], bool],
    engine: _Engine | None,
) -> Iterator[str]:
    gpus, train, shared = who
    named = request.vllm is not None or request.train is not None or request.share is not None
    if shared and named:
        yield "vLLM and the ranks share their GPUs: [gpus] says so"
    elif shared and len(machine.gpus) == 1:
        yield "vLLM and one rank share the only GPU: vLLM sleeps while the rank works"
    elif shared:
        apart = "" if request.ranks is None else f" with ranks = {request.ranks}"
        yield (
            f"vLLM and {len(train)} ranks share {len(train)} GPUs: apart they have no room{apart}"
        )
    elif named:
        yield "vLLM and the ranks are apart, on the GPUs of [gpus]"
    elif gpus and train:
        fewest = "ranks says how many" if request.ranks else "the fewest that hold it, for"
        fewest += "" if request.ranks else " decoding takes most of a step"
        count = f"{len(train)} of {len(machine.gpus)} GPUs train"
        yield f"apart, so that both work at once: {count} ({fewest})"
    if engine is not None:
        size = engine.tensor_parallel
        why = (
            "as vllm.tensor_parallel says"
            if request.tensor_parallel
            else "the smallest that holds weights and a useful KV cache"
        )
        yield f"tensor_parallel = {size}: {why}; data_parallel = {engine.data_parallel}"
        yield (
            f"KV cache of {engine.tokens} tokens an engine:"
            f" {engine.tokens / max(1, sizes.max_model_len):.1f} of the longest sequences"
            f" ({sizes.max_model_len} tokens)"
        )
    used = set(gpus) | set(train)
    if idle := [n for n in _numbers(machine) if n not in used]:
        yield f"GPUs {_words(tuple(idle))} are left idle"


def _why_not(
    machine: Machine, sizes: ModelSizes, request: PlacementRequest, refused: Mapping[bool, str]
) -> str:
    gpus = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}"
    each = _gib(min(gpu.free for gpu in machine.gpus))
    kinds = ("apart", "shared")
    said = "; ".join(f"{kinds[shared]}, {line}" for shared, line in refused.items())
    line = (
        f"model: {sizes.parameters / 1e9:.2f}e9 parameters do not fit on {gpus} with {each} free"
        f" each: {said or '[gpus] leaves no way to lay it out'}"
    )
    would = _would_fit(machine, sizes, request)
    if would:
        return f"{line}. It would fit with {', or with '.join(would)}"
    single = [name for name in sizes.ways if AND not in name]
    return f"{line}. Not enough: {', '.join(single) or 'our settings'}; take more or larger GPUs"


def _would_fit(machine: Machine, sizes: ModelSizes, request: PlacementRequest) -> list[str]:
    """Of the settings that would do those that change least."""
    ways = {name: replace(sizes, ranks=ranks) for name, ranks in sizes.ways.items()}
    if sizes.max_model_len > SHORT:
        ways[f"vllm.max_model_len = {SHORT}"] = replace(sizes, max_model_len=SHORT)

    def fits(changed: ModelSizes) -> bool:
        splits = _splits(machine, request)
        return any(isinstance(_try(machine, changed, request, one), Placement) for one in splits)

    found = [name for name, changed in ways.items() if fits(changed)]
    least = min((name.count(AND) for name in found), default=0)
    return [name for name in found if name.count(AND) == least]


def _useful_tokens(sizes: ModelSizes) -> int:
    longest = sizes.max_model_len
    return max(longest, USEFUL_SEQUENCES * min(longest, USEFUL_TOKENS))


def _numbers(machine: Machine) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in machine.gpus)


def _room(gpu: Gpu) -> int:
    return gpu.free - int(RESERVE * gpu.total)


def gpu_words(gpus: Sequence[int]) -> str:
    """`0-5` for numbers in a row, else `0,2`: as `parse_gpus` reads them."""
    return _words(tuple(gpus))


def _words(gpus: tuple[int, ...]) -> str:
    if len(gpus) > 1 and gpus == tuple(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(count)}" for name, count in parts.items())


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"

"""Which GPUs might serve and which train: ways to try, the best first, and what cannot be asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracegrad_trainer.launch.machine import Machine
from tracegrad_trainer.launch.placement_inputs import PlacementRequest

# At most every so manieth GPU trains, where that is enough: decoding takes most of a step's time.
TRAIN_SHARE = 4


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs that serve and that train; the same ones, if they share them."""

    engine: tuple[int, ...]
    train: tuple[int, ...]
    shared: bool


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
    if not there or not request.train_on_gpu:
        return
    if request.rank_multiple > there:
        raise ValueError(
            "fsdp.context_parallel, fsdp.replicas: the number of ranks must be a multiple of"
            f" {request.rank_multiple}, one rank trains on each GPU, and this machine has {there}:"
            " lower them"
        )
    if ranks is None:
        return
    if request.train is not None and len(request.train) != ranks:
        raise ValueError(
            f"ranks = {ranks}, but gpus.train = {gpu_words(request.train)!r} names"
            f" {len(request.train)}: one rank trains on each GPU; leave ranks out"
        )
    if ranks > there:
        raise ValueError(
            f"ranks = {ranks}: this machine has {there} GPU{'s' * (there > 1)}, and one rank trains"
            f" on each: set ranks = {there}, or leave it out"
        )


def splits(machine: Machine, request: PlacementRequest) -> Iterator[Split]:
    """Ways to lay it out, the best first."""
    numbers = usable(machine, request)
    engine, train = request.vllm, request.train
    if not request.engine_on_gpu:
        yield Split((), train or all_ranks(numbers, request), False)
        return
    if not request.train_on_gpu:
        yield Split(engine or numbers, (), False)
        return
    if not request.share:
        yield from _apart(numbers, request)
    if request.share is False or (engine and train and set(engine) != set(train)):
        return
    together = engine or train
    if together is not None:
        whole = request.share or set(together) == set(numbers)
        if whole and request.ranks in (None, len(together)):
            yield Split(together, together, True)
        return
    counts = reversed(_rank_counts(request, numbers))
    yield from (Split(numbers[:n], numbers[:n], True) for n in counts)


def _apart(numbers: tuple[int, ...], request: PlacementRequest) -> Iterator[Split]:
    """The fewest GPUs train: the last ones."""
    engine, train = request.vllm, request.train
    if engine is not None and train is not None:
        if not set(engine) & set(train):
            yield Split(engine, train, False)
        return
    if train is not None:
        rest = tuple(n for n in numbers if n not in train)
        if rest:
            yield Split(rest, train, False)
        return
    free = tuple(n for n in numbers if n not in (engine or ()))
    for count in _rank_counts(request, free, least=math.ceil(len(numbers) / TRAIN_SHARE)):
        rest = engine or free[: len(free) - count]
        if rest and count <= len(free):
            yield Split(rest, free[len(free) - count :], False)


def _rank_counts(request: PlacementRequest, free: Sequence[int], least: int = 1) -> Sequence[int]:
    if request.ranks is not None:
        return [request.ranks]
    counts = range(min(least, max(1, len(free))), len(free) + 1)
    return [count for count in counts if count % request.rank_multiple == 0]


def all_ranks(numbers: tuple[int, ...], request: PlacementRequest) -> tuple[int, ...]:
    """GPUs of ranks that need not leave any to vLLM."""
    count = request.ranks or len(numbers) // request.rank_multiple * request.rank_multiple
    return numbers[: count or len(numbers)]


def usable(machine: Machine, request: PlacementRequest) -> tuple[int, ...]:
    """GPUs to choose from: not those of which others hold more than half, where there are enough
    without."""
    free = tuple(gpu.index for gpu in machine.gpus if 2 * gpu.free >= gpu.total)
    named = set(request.vllm or ()) | set(request.train or ())
    enough = len(set(free) - named) + len(named) >= (request.ranks or 1)
    return free if free and enough else tuple(gpu.index for gpu in machine.gpus)


def gpu_words(gpus: Sequence[int]) -> str:
    """`0-5` for numbers in a row, else `0,2`: as `parse_gpus` reads them."""
    if len(gpus) > 1 and list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))

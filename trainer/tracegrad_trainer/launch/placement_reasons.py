"""Why a placement is as it is, for people: a line a decision."""

from __future__ import annotations

from collections.abc import Iterator

from tracegrad_trainer.launch.engine_layout import EngineLayout
from tracegrad_trainer.launch.gpu_splits import Split, gpu_words
from tracegrad_trainer.launch.machine import Machine
from tracegrad_trainer.launch.placement_inputs import ModelSizes, PlacementRequest, in_gib


def placement_reasons(
    machine: Machine,
    sizes: ModelSizes,
    request: PlacementRequest,
    split: Split,
    layout: EngineLayout | None,
) -> Iterator[str]:
    yield _who_is_where(machine, request, split)
    if layout is not None:
        size = layout.tensor_parallel
        why = (
            "as vllm.tensor_parallel says"
            if request.tensor_parallel
            else "the smallest that holds weights and a useful KV cache"
        )
        yield f"tensor_parallel = {size}: {why}; data_parallel = {layout.data_parallel}"
        yield (
            f"KV cache of {layout.tokens} tokens an engine:"
            f" {layout.tokens / max(1, sizes.max_model_len):.1f} of the longest sequences"
            f" ({sizes.max_model_len} tokens)"
        )
    if split.shared:
        yield f"vLLM sleeps at level {request.sleep_level}: {_why_level(request)}"
    yield f"weights are pushed by {_transport(request)}"
    unused = [gpu for gpu in machine.gpus if gpu.index not in {*split.engine, *split.train}]
    for gpu in unused:
        if 2 * gpu.free < gpu.total:
            yield (
                f"GPU {gpu.index} is left out: others hold {in_gib(gpu.total - gpu.free)} of its"
                f" {in_gib(gpu.total)}; name it in [gpus] to use it all the same"
            )
    if idle := [gpu.index for gpu in unused if 2 * gpu.free >= gpu.total]:
        yield f"GPU{'s' * (len(idle) > 1)} {gpu_words(idle)}: left idle"


def _why_level(request: PlacementRequest) -> str:
    if request.sleep_level == 1:
        return "what it has loaded waits in the host's memory"
    if request.sleep_level_asked:
        return "gpus.sleep_level says so"
    return "the host's memory does not hold its weights as well"


def _transport(request: PlacementRequest) -> str:
    name, asked = request.transport, request.transport_asked
    why = {
        "ipc": "in GPU memory that rank 0 shares with vLLM, on this machine",
        "nccl": "broadcast from GPU to GPU, engines are on other machines",
        "gloo": "broadcast over TCP, engines are on other machines",
        "files": "as vLLM reads them",
        "nccl_m2n": "from every rank's shards",
    }
    return f"{name} ({'push.transport says so' if asked else why[name]})"


def _who_is_where(machine: Machine, request: PlacementRequest, split: Split) -> str:
    train, ranks = len(split.train), request.ranks
    if not request.engine_here:
        where = f"{train} of {len(machine.gpus)} GPUs train" if train else "the CPU trains"
        return f"vLLM runs already (vllm.urls), and takes nothing that is planned here: {where}"
    if not split.train and not split.engine:
        why = (
            "this machine has no GPU" if not machine.gpus else "vllm.device and fsdp.device say so"
        )
        count = ranks or 1
        return f"vLLM and {count} rank{'s' * (count > 1)} on the CPU: {why}"
    if not split.train:
        return "the ranks are on the CPU: fsdp.device says so"
    if not split.engine:
        return "vLLM is on the CPU (vllm.device, or its build that is installed)"
    named = request.vllm is not None or request.train is not None or request.share is not None
    if split.shared:
        if named:
            return "vLLM and the ranks share their GPUs: [gpus] says so"
        if len(machine.gpus) == 1:
            return "vLLM and one rank share the only GPU: vLLM sleeps while the rank works"
        given = "" if ranks is None else f" with ranks = {ranks}"
        who = "one rank share a GPU" if train == 1 else f"{train} ranks share {train} GPUs"
        return f"vLLM and {who}: apart they have no room{given}"
    if named:
        return "vLLM and the ranks are apart, on the GPUs of [gpus]"
    fewest = "ranks says how many"
    if ranks is None:
        fewest = "the fewest that hold it, a quarter at least: decoding takes most of a step"
    of = f"{train} of {len(machine.gpus)} GPUs train{'s' * (train == 1)}"
    return f"apart, so that both work at once: {of} ({fewest})"

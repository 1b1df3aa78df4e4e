"""How vLLM is divided over its GPUs, and how much of each is its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tracegrad_trainer.launch.machine import Gpu
from tracegrad_trainer.launch.placement_inputs import (
    CONTEXT,
    WORKSPACE,
    ModelSizes,
    PlacementRequest,
    in_gib,
    room_of,
)

# A KV cache is of use if it holds the longest sequence, and so many of this length.
USEFUL_SEQUENCES, USEFUL_TOKENS = 16, 4096
# Bytes a logit of a decoded batch: in float32, scaled, and sorted or copied for log-probabilities.
_PER_LOGIT = 12


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Bytes of each GPU, of which `tensor_parallel` hold a copy of the model."""

    tensor_parallel: int
    data_parallel: int
    weights: int
    workspace: int
    kv: int
    tokens: int  # that the KV cache of a copy holds

    def share_of(self, gpus: list[Gpu]) -> float:
        """`gpu_memory_utilization` with which vLLM starts on each of them: it compares this share
        of the whole with what its own context has left free. Rounded down: it refuses less."""
        used = self.weights + self.workspace - CONTEXT + self.kv
        return int(1000 * used / max(gpu.total for gpu in gpus)) / 1000


def fit_engine(
    gpus: list[Gpu],
    sizes: ModelSizes,
    request: PlacementRequest,
    beside: int,
    buffers: Callable[[int], int],
) -> EngineLayout | str:
    """The layout with the smallest copies, or why there is none. `beside`: bytes of each GPU that
    ranks keep while vLLM serves; `buffers`: that pushes take, by how many GPUs a copy has."""
    count = len(gpus)
    room = min(map(room_of, gpus))
    total = min(gpu.total for gpu in gpus)
    needed = _useful_tokens(sizes)
    if request.kv_cache_bytes or request.gpu_memory_utilization:
        needed = sizes.max_model_len  # as vLLM itself
    asked = (request.tensor_parallel or 1) * (request.data_parallel or 1)
    said = f"vLLM as [vllm] says needs {asked} GPUs, and {count} would be left for it"
    for size in _tensor_sizes(sizes, request, count):
        copies = request.data_parallel or count // size
        if not size <= size * copies <= count:
            continue
        weights = -(-sizes.served // size)
        # Logits are gathered: the first GPU of a copy has those of the whole vocabulary.
        workspace = CONTEXT + WORKSPACE + _PER_LOGIT * request.max_num_seqs * sizes.vocabulary
        left = room - beside - buffers(size) - weights - workspace
        kv = left
        if request.kv_cache_bytes:
            kv = request.kv_cache_bytes
        elif request.gpu_memory_utilization:
            kv = int(request.gpu_memory_utilization * total) - weights - workspace + CONTEXT
        a_token = -(-sizes.kv_bytes // min(size, sizes.kv_heads))
        if needed * a_token <= kv <= left:
            return EngineLayout(size, copies, weights, workspace, kv, kv // a_token)
        wanted = weights + workspace + max(kv if kv != left else 0, needed * a_token)
        taken = {"training state": beside, "a push's buffers": buffers(size)}
        others = " and ".join(f"{in_gib(n)} of {name}" for name, n in taken.items() if n)
        said = (
            f"vLLM on {size} GPU{'s' * (size > 1)} needs {in_gib(wanted)} of each (weights"
            f" {in_gib(weights)}, working memory {in_gib(workspace)}, a KV cache of {needed} tokens"
            f" {in_gib(needed * a_token)}){f' beside {others}' if others else ''}, and has"
            f" {in_gib(room)}"
        )
    return said


def divides(sizes: ModelSizes, size: int) -> bool:
    """Whether vLLM can divide the model over so many GPUs: heads and MLPs into equal parts; of
    fewer KV heads than GPUs each is kept by equally many."""
    kv = sizes.kv_heads
    whole = kv % size == 0 if size <= kv else size % kv == 0
    return sizes.heads % size == 0 and sizes.inner % size == 0 and whole


def check_engine(count: int, sizes: ModelSizes, request: PlacementRequest) -> None:
    """Of a machine with so many GPUs. Raises ValueError: vLLM could not start as asked."""
    size, copies = request.tensor_parallel, request.data_parallel
    if size is not None and not divides(sizes, size):
        fit = [n for n in range(1, count + 1) if divides(sizes, n)]
        inner = f", MLPs of {sizes.inner}" if sizes.inner else ""
        raise ValueError(
            f"vllm.tensor_parallel = {size} does not divide the model ({sizes.heads} attention"
            f" heads, {sizes.kv_heads} of keys and values{inner}): on {count}"
            f" GPU{'s' * (count > 1)} it may be {' or '.join(map(str, fit))}"
        )
    there = count if request.vllm is None else len(request.vllm)
    if (size or 1) * (copies or 1) > there:
        asked = {"tensor_parallel": size, "data_parallel": copies}
        said = " and ".join(f"vllm.{name} = {value}" for name, value in asked.items() if value)
        whose = "this machine has" if request.vllm is None else "gpus.vllm names"
        raise ValueError(
            f"{said}: {(size or 1) * (copies or 1)} GPUs are needed, and {whose} {there}; lower"
            " it, or leave it out"
        )


def _tensor_sizes(sizes: ModelSizes, request: PlacementRequest, count: int) -> list[int]:
    """Powers of two that divide the model, the smallest first."""
    if request.tensor_parallel is not None:
        return [request.tensor_parallel]
    powers = (1 << power for power in range(count.bit_length()))
    return [size for size in powers if size <= count and divides(sizes, size)]


def _useful_tokens(sizes: ModelSizes) -> int:
    longest = sizes.max_model_len
    return max(longest, USEFUL_SEQUENCES * min(longest, USEFUL_TOKENS))

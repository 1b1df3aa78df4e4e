"""What a placement is chosen from: what a model takes, what the settings fix, what is assumed.

What vLLM needs beside weights and KV cache, and what a process costs on a GPU, are assumptions (the
constants below): no GPU was at hand to measure them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tracegrad_trainer.config.push_transport import BUCKET_BYTES, Transport
from tracegrad_trainer.launch.machine import GIB, Gpu

# Of each GPU's memory, left to fragmentation and to what no estimate knows.
RESERVE = 0.05
# A process on a GPU: CUDA's context, cuBLAS's and NCCL's buffers.
CONTEXT = 1 * GIB
# vLLM beside weights and KV cache: one scheduled batch's activations, CUDA graphs; logits besides.
WORKSPACE = 2 * GIB
# A process's libraries in the host's memory.
PROCESS = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank; `offloaded`: the state is in the host's memory. `gradients` are part of
    the state, and gone between steps."""

    state: int
    gathered: int
    activations: int
    host: int  # beside the state, while it loads or copies a checkpoint
    gradients: int = 0
    offloaded: bool = False

    @property
    def resident(self) -> int:
        """On its GPU while it trains, whatever it computes."""
        return CONTEXT + (0 if self.offloaded else self.state)

    @property
    def between_steps(self) -> int:
        """On its GPU while a vLLM that shares it serves: the forward with which a push is checked
        gathers weights as well."""
        return self.resident - (0 if self.offloaded else self.gradients) + self.gathered

    @property
    def peak(self) -> int:
        return self.resident + self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What a model takes. `ranks`: a rank's memory, by number of ranks from 1 up to the number of
    GPUs; `ways`: the same with settings that take less, by their names."""

    parameters: int
    served: int  # bytes of its weights as vLLM holds them
    kv_bytes: int  # of a token, in all layers and heads
    kv_heads: int  # into how many parts it can be divided
    heads: int
    vocabulary: int
    max_model_len: int
    pushed: int  # bytes of the files of a weight push, of two versions
    ranks: Mapping[int, RankMemory]
    ways: Mapping[str, Mapping[int, RankMemory]]
    inner: int = 0  # greatest common divisor of the widths of MLPs and experts; 0: not known
    pushed_to_memory: bool = True  # those files are in the host's memory
    largest: int = 0  # bytes of its largest tensor in a push
    experts: int = 0  # bytes of a block's experts in a push
    beside: int = 0  # bytes of `served` that are not trained, as a vision tower's


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
    sleep_level: Literal[1, 2] = 1
    sleep_level_asked: bool = True  # False: where 1 takes too much of the host's memory it is 2
    rank_multiple: int = 1  # how many ranks there are is a multiple of it
    engine_here: bool = True  # False: vLLM runs already, and nothing is planned for it
    transport: Transport = "files"  # of pushes
    transport_asked: bool = True  # False: where another takes too much memory it is files
    engine_on_gpu: bool = True
    train_on_gpu: bool = True


def push_buffers(
    sizes: ModelSizes, request: PlacementRequest, size: int, *, ranks: int, shared: bool
) -> int:
    """Bytes on each of vLLM's GPUs, beside it and a rank that is there, where `size` of them hold
    the model. A worker copies whole tensors, until it has all of a layer, and then makes its part
    of that; with `ipc` rank 0 has a context on the GPU and a bucket besides. On the one GPU of
    both there is room: a vLLM that was asleep has no KV cache yet while it loads."""
    if request.transport not in ("ipc", "nccl") or (shared and ranks == 1):
        return 0
    bucket = max(BUCKET_BYTES, sizes.largest)
    layer = max(bucket, sizes.experts)
    copied = layer + -(-layer // size)
    return copied if request.transport == "nccl" else CONTEXT + bucket + copied


def room_of(gpu: Gpu) -> int:
    """Bytes that may be planned with."""
    return gpu.free - int(RESERVE * gpu.total)


def in_gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {in_gib(count)}" for name, count in parts.items())

"""What a step, a push and a checkpoint take, on paper: pure functions of a model's shapes, of how
it is laid out, and of what the hardware moves a second.

Memory is what the trainer itself estimates before it starts. Seconds are bytes over a bandwidth, or
operations over what is reached of a peak: nothing waits for anything but what is named here, so
that they are bounds from below. `measured` holds them against a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tracegrad_trainer.engine import FsdpSettings
from tracegrad_trainer.engine.flops import attention_operations, operations_per_token
from tracegrad_trainer.engine.model.hf_config import transformer_blocks
from tracegrad_trainer.engine.model.memory import estimate_memory

MASTER, SERVED = 4, 2  # bytes of a trained weight, and of one in bfloat16
MOMENTS = 8  # AdamW's two


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Bytes or operations a second. `link` is between GPUs of a node, `network` of one GPU to other
    nodes, `bus` between a GPU and the host's pinned memory, `pageable` its other memory;
    `shared_memory` is what one process writes, `disk` a node's."""

    name: str
    peak: float
    utilization: float  # of the peak, by a step's matrix products and attention
    memory: int
    gpus_per_node: int
    link: float
    network: float
    bus: float
    pageable: float
    shared_memory: float
    disk: float

    def collective(self, gpus: int) -> float:
        """Of a gather or a reduction over so many GPUs, each one's part left out. Between nodes all
        GPUs of a node carry one and the same data, each a share of it (NCCL's rings; nccl-tests,
        PERFORMANCE.md, names this the bus bandwidth)."""
        if gpus <= self.gpus_per_node:
            return self.link
        return min(self.link, self.gpus_per_node * self.network)


H100 = Hardware(
    name="H100 80 GB, 8 a node",
    peak=989e12,  # data sheet, dense bfloat16
    utilization=0.4,  # the goal of issue 12, recomputed operations counted; not reached yet
    memory=79 << 30,  # nvidia-smi: 81,559 MiB, of which a CUDA context takes some hundred
    gpus_per_node=8,
    link=450e9 * 0.7,  # NVLink 4, one way; what collectives usually reach of it
    network=50e9 * 0.7,  # 400 Gb/s a GPU
    bus=50e9,  # PCIe 5 x16: 63 by the standard
    pageable=6e9,  # one core copies to and from the driver's own buffers
    # Seen with `WeightFiles` on a Xeon, one core: 2.0 to 2.2 to write, and 6 to look for NaN first.
    shared_memory=1.6e9,
    disk=5e9,  # one NVMe drive
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of a model: numbers of weights, and operations."""

    parameters: int
    block: int  # weights of the largest block
    blocks: int
    token: float  # operations of a token, forward and backward, without attention
    attended: float  # operations of a token for each that it attends to
    served: int  # bytes

    @classmethod
    def of(cls, model: nn.Module) -> Shapes:
        """`model` may be on the meta device."""
        blocks = transformer_blocks(model)
        count = sum(p.numel() for p in model.parameters())
        return cls(
            parameters=count,
            block=max(sum(p.numel() for p in block.parameters()) for block in blocks),
            blocks=len(blocks),
            token=operations_per_token(model),
            attended=3 * attention_operations(model),
            served=SERVED * count,
        )

    def row(self, tokens: float) -> float:
        """Operations of a row, forward and backward: a token sees half of it on average."""
        return tokens * (self.token + self.attended * tokens / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a micro-batch on one GPU: computed, and moved meanwhile."""

    compute: float
    gather: float
    tokens_per_s: float  # of all GPUs

    @property
    def exposed(self) -> bool:
        """Whether GPUs wait for weights."""
        return self.gather > self.compute


def step_cost(
    shapes: Shapes, hardware: Hardware, *, gpus: int, tokens: int, row: int, recomputed: bool = True
) -> StepCost:
    """Of micro-batches of `tokens` tokens a GPU in rows of `row`, as FSDP runs them: a block's
    weights are gathered for forward and for backward, its gradients are reduced in float32."""
    operations = shapes.row(row) * tokens / row
    if recomputed:  # a second forward
        operations *= 4 / 3
    compute = operations / (hardware.peak * hardware.utilization)
    share = (gpus - 1) / gpus
    moved = (2 * SERVED + MASTER) * shapes.parameters * share
    gather = moved / hardware.collective(gpus)
    return StepCost(
        compute=compute,
        gather=gather,
        tokens_per_s=gpus * tokens / max(compute, gather),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """Bytes."""

    gpu: int
    host: int  # of a node


def memory_cost(
    model: nn.Module, fsdp: FsdpSettings, hardware: Hardware, *, gpus: int, tokens: int
) -> MemoryCost:
    """The trainer's own estimate; `tokens` of a micro-batch."""
    found = estimate_memory(model, fsdp, ranks=gpus, tokens=tokens)
    ranks = min(gpus, hardware.gpus_per_node)
    return MemoryCost(gpu=found.on_device, host=ranks * found.on_host)


def push_seconds(
    shapes: Shapes, hardware: Hardware, *, gpus: int, transport: Literal["files", "ipc"] = "files"
) -> dict[str, float]:
    """By stage. Either way rank 0 gathers every tensor and writes it to files in shared memory,
    while the engine goes on. In `load` it stands still: it reads the files and copies them to its
    GPU; or (ipc) all ranks gather once more, and rank 0 copies to a GPU of the engine."""
    share = (gpus - 1) / gpus
    gather = shapes.served * share / hardware.collective(gpus)
    load = shapes.served / hardware.pageable  # files are mapped: not pinned either
    if transport == "ipc":
        load = gather + shapes.served / hardware.link
    return {
        "gather": gather,
        "to host": shapes.served / hardware.pageable,
        "write": shapes.served / hardware.shared_memory,
        "load": load,
    }


def checkpoint_bytes(shapes: Shapes) -> int:
    """Weights and two moments in float32."""
    return (MASTER + MOMENTS) * shapes.parameters


def checkpoint_seconds(shapes: Shapes, hardware: Hardware, *, gpus: int) -> dict[str, float]:
    """`waits`: training, for the copy; `write` goes on beside it; `resume` reads all of it, on as
    many nodes or on others (each reads what its shards need); `start` reads the model's files."""
    size = checkpoint_bytes(shapes)
    nodes = -(-gpus // hardware.gpus_per_node)
    return {
        "waits": size / gpus / hardware.bus,
        "write": size / nodes / hardware.disk,
        "resume": size / nodes / hardware.disk + size / gpus / hardware.bus,
        "start": shapes.served / hardware.disk,
    }


def interval_for(shapes: Shapes, hardware: Hardware, *, gpus: int, step_s: float) -> int:
    """The smallest `checkpoint.every_steps` at which the disk keeps up with steps of `step_s`."""
    writing: Any = checkpoint_seconds(shapes, hardware, gpus=gpus)["write"]
    return max(1, -(-int(writing * 1000) // max(1, int(step_s * 1000))))

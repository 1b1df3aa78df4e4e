"""`python -m bench.cost`: what training takes on GPUs, on paper, and how the model of cost does on
this machine. Writes docs/bench-cost.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from bench.cost.measured import STAGES, Measured, measure, predicted, sizes
from bench.cost.model import (
    H100,
    Hardware,
    Shapes,
    checkpoint_seconds,
    interval_for,
    memory_cost,
    push_seconds,
    step_cost,
)
from bench.pages import parser_of, publish
from bench.proxy.machine import description
from bench.tables import markdown, number
from bench.trainer.loading import MODELS
from tracegrad_trainer.engine import FsdpSettings

GPUS = (1, 8, 64)
TOKENS, ROW = 16_384, 4096  # of a micro-batch, of a row
STEP_TOKENS = 4 << 20  # of a step: 1,024 rollouts of 4k tokens
GIB = 1 << 30


def _small() -> PreTrainedConfig:
    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("cost", __doc__, quick="smaller models for the CPU's part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(size, Path(folder), tiny=options.quick) for size in sizes(options.quick)]
    publish(page(found), options)
    return 0


_HEAD = """# What training takes, on paper

Written by `python -m bench.cost`; do not edit. The model is `bench/cost/model.py`: bytes over a
bandwidth, or operations over what is reached of a peak, so bounds from below. Memory is what the
trainer estimates before it starts.
"""
_MEMORY = f"""
## Memory and speed

All weights in bfloat16 compute, blocks recomputed, micro-batches of {TOKENS:,} tokens a GPU in rows
of {ROW:,}. A step is {STEP_TOKENS >> 20} million tokens. What does not fit needs `[fsdp.lora]`,
`fsdp.cpu_offload` or more GPUs. Where GPUs wait for weights, larger micro-batches,
`fsdp.reshard = false` or `fsdp.replicas` help.
"""
_TRANSFERS = """
## Push and checkpoint, seconds

A push goes to files in shared memory, through rank 0 alone, while the engine goes on; the engine
*waits* while it loads them, or with `push.transport = "ipc"` what the ranks gather once more. A
checkpoint is written by all ranks.
*Interval* is the least `checkpoint.every_steps` at which the disk keeps up. Resuming with another
number of GPUs reads as much: each rank reads what its shards need.
"""
_SHAPE = """
## The shape, on a CPU

Rates are fitted on the first three sizes, the last is predicted by them; one thread. Bytes are
compared as they are.
"""


def page(found: list[Measured]) -> str:
    machine = description(["torch", "transformers"])
    parts = [_HEAD, assumed(H100), _MEMORY, paper_table(H100), _TRANSFERS, transfer_table(H100)]
    return "\n".join(
        [
            *parts,
            _SHAPE,
            *(f"- {line}" for line in machine),
            "",
            bytes_table(found),
            seconds_table(found),
        ]
    )


def assumed(hardware: Hardware) -> str:
    speeds = {
        "between GPUs of a node": hardware.link,
        "a GPU to other nodes": hardware.network,
        "a GPU to pinned memory": hardware.bus,
        "to other memory": hardware.pageable,
        "shared memory, one process": hardware.shared_memory,
        "disk, a node": hardware.disk,
    }
    said = ", ".join(f"{name} {value / 1e9:.3g} GB/s" for name, value in speeds.items())
    return (
        f"Assumed (sources: `bench/cost/model.py`): {hardware.name};"
        f" {hardware.peak / 1e12:.0f} TFLOP/s in bfloat16, of which {hardware.utilization:.0%} are"
        f" reached, recomputed blocks counted; {said}. None of it was measured on a GPU by us."
    )


def paper_table(hardware: Hardware) -> str:
    rows = []
    for name, config in _models().items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = Shapes.of(model)
        fsdp = FsdpSettings(
            device="cuda", compute_dtype="bfloat16", gradient_checkpointing=True, attention="varlen"
        )
        for gpus in GPUS:
            memory = memory_cost(model, fsdp, hardware, gpus=gpus, tokens=TOKENS)
            step = step_cost(shapes, hardware, gpus=gpus, tokens=TOKENS, row=ROW)
            fits = memory.gpu <= hardware.memory
            speed = f"{step.tokens_per_s:,.0f}" if fits else "does not fit"
            seconds = number(STEP_TOKENS / step.tokens_per_s) if fits else ""
            waits = ("yes" if step.exposed else "no") if fits else ""
            sizes_ = [f"{memory.gpu / GIB:,.0f}", f"{memory.host / GIB:,.0f}"]
            rows.append([name, str(gpus), *sizes_, speed, seconds, waits])
    header = ["model", "GPUs", "GiB a GPU", "host GiB a node", "tokens/s", "s a step"]
    return markdown([*header, "waits for weights"], rows)


def transfer_table(hardware: Hardware) -> str:
    rows = []
    for name, config in _models().items():
        with torch.device("meta"):
            shapes = Shapes.of(AutoModelForCausalLM.from_config(config))
        for gpus in GPUS:
            push = push_seconds(shapes, hardware, gpus=gpus)
            saved = checkpoint_seconds(shapes, hardware, gpus=gpus)
            step = step_cost(shapes, hardware, gpus=gpus, tokens=TOKENS, row=ROW)
            every = interval_for(
                shapes, hardware, gpus=gpus, step_s=STEP_TOKENS / step.tokens_per_s
            )
            shared = push_seconds(shapes, hardware, gpus=gpus, transport="ipc")["load"]
            shown = [sum(push.values()), push["write"], push["load"], shared, *saved.values()]
            rows.append([name, str(gpus), *map(number, shown), str(every)])
    header = ["model", "GPUs", "push", "of it to write", "engine waits", "with ipc"]
    header += ["checkpoint: training waits", "written"]
    return markdown([*header, "resumed from", "model loaded from its files", "interval"], rows)


def bytes_table(found: list[Measured]) -> str:
    rows = [
        [
            one.name,
            f"{one.parameters / 1e6:.1f}",
            *(
                f"{size / 1e6:,.1f} ({size / one.expected[stage] - 1:+.1%})"
                for stage, size in one.written.items()
            ),
        ]
        for one in found
    ]
    return markdown(["model", "million weights", "MB of push files", "MB of checkpoint"], rows)


def seconds_table(found: list[Measured]) -> str:
    last = found[-1]
    rows = []
    for stage in STAGES:
        wanted, seen = predicted(found, stage), last.seconds[stage]
        each = ", ".join(f"{one.seconds[stage]:.3f}" for one in found)
        rows.append([stage, each, f"{wanted:.3f}", f"{wanted / seen - 1:+.0%}"])
    return markdown(["", "s, by size", f"predicted of {last.name}", "off by"], rows)


def _models() -> dict[str, PreTrainedConfig]:
    return {"0.6B": _small(), **{name: config() for name, (config, _) in MODELS.items()}}


if __name__ == "__main__":
    sys.exit(main())

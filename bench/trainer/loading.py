"""What a machine's memory holds while a model is loaded: on paper, and measured on a CPU.

`python -m bench.trainer.loading` prints both tables; docs/training.md has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bench.tables import markdown
from tracegrad_trainer.engine import (
    FsdpSettings,
    build_model,
    build_sharded,
    destroy_process_group,
    init_process_group,
    shard,
)
from tracegrad_trainer.engine.model import memory

GPUS = 8  # of a machine
_WARM = "warm-up"
_GIB, _MIB = 1 << 30, 1 << 20
_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "num_key_value_heads": 8}


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> PreTrainedConfig:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=False,
        **_QWEN3,
    )


# Name -> config and machines: Qwen3 8B and 32B, Llama 3 70B, Qwen3 235B-A22B.
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], tuple[int, ...]]] = {
    "8B": (lambda: _qwen3(4096, 12_288, 36, 32), (1,)),
    "32B": (lambda: _qwen3(5120, 25_600, 64, 64), (1, 2)),
    "70B": (
        lambda: LlamaConfig(
            hidden_size=8192,
            intermediate_size=28_672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128_256,
        ),
        (2, 8),
    ),
    "235B-A22B": (
        lambda: Qwen3MoeConfig(
            hidden_size=4096,
            intermediate_size=12_288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151_936,
            num_experts=128,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
        ),
        (8,),
    ),
}


def paper_table() -> str:
    """GiB, by `memory.estimate_memory`."""
    header = [
        *("model", "GPUs", "host, each rank the whole model", "host now", "of a rank"),
        *("weights a GPU", "a checkpoint's copy, host"),
    ]
    rows = []
    for name, (config, machines) in MODELS.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config())
        for count in machines:
            ranks = GPUS * count
            found = memory.estimate_memory(
                model, FsdpSettings(device="cuda"), ranks=ranks, tokens=1
            )
            whole = 4 * found.parameters
            shown = [GPUS * whole, GPUS * found.loading, found.loading, whole / ranks]
            rows.append([name, str(ranks), *map(_gib, [*shown, GPUS * found.copied])])
    return markdown(header, rows)


def _gib(size: float) -> str:
    gib = size / _GIB
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.1f}"


# -- measured ----------------------------------------------------------------------------------


def measured_table(folder: Path) -> str:
    """MiB by which a rank's peak of resident memory rises, the highest of all ranks."""
    rows = []
    for name, path in _written(folder).items():
        for ranks in (2, 4):
            by_rank = {how: _on_ranks(path, how, ranks) for how in ("shards", "whole")}
            own, largest = max(by_rank["shards"])[1:]
            rises = [f"{max(by_rank[how])[0]:.0f}" for how in ("whole", "shards")]
            rows.append([name, str(ranks), f"{own:.0f}", f"{largest:.0f}", *rises])
    header = ["files", "ranks", "own shards", "largest of them", "whole load, rise", "rise now"]
    return markdown(header, rows)


def _written(folder: Path) -> dict[str, Path]:
    shape: dict[str, Any] = {
        "vocab_size": 16_000,
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    dense = Qwen3Config(**shape, intermediate_size=3072)
    mixture = Qwen3MoeConfig(**(shape | {"num_hidden_layers": 3}), **experts)
    small = shape | {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100}
    warm: Any = AutoModelForCausalLM.from_config(Qwen3Config(**small, intermediate_size=32))
    warm.save_pretrained(folder / _WARM)
    made = {}
    for name, config, dtype in (
        ("dense, float32", dense, torch.float32),
        ("dense, bfloat16", dense, torch.bfloat16),
        ("16 experts, bfloat16", mixture, torch.bfloat16),
    ):
        torch.manual_seed(0)
        made[name] = folder / name.replace(" ", "-")
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(made[name])
    return made


def _on_ranks(folder: Path, how: str, ranks: int) -> list[tuple[float, float, float]]:
    """(rise, own shards, largest shard) of each rank, MiB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "bench.trainer.loading", how, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(lines) == ranks, done.stdout
    return [_three(line) for line in lines]


def _three(line: str) -> tuple[float, float, float]:
    rise, own, largest = map(float, line.split()[1:])
    return rise, own, largest


def _rank(how: str, folder: Path) -> None:
    """Prints what one rank saw. Linux alone lets a process begin its peak anew."""
    settings = FsdpSettings(device="cpu", threads=1)
    mesh = init_process_group(settings)
    build_sharded(folder.parent / _WARM, mesh, settings)  # what is made once for any model
    memory.check_rows_apart = lambda *_: None  # a forward, with its own memory
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    if how == "shards":
        model = build_sharded(folder, mesh, settings)
    else:
        model = shard(build_model(folder, settings), mesh, settings)
    rise = _status("VmHWM") - before
    parts: list[Any] = [parameter.detach() for parameter in model.parameters()]
    sizes = [part.to_local().numel() * 4 / _MIB for part in parts]
    # torchrun's ranks are unbuffered and share a pipe: one write.
    sys.stdout.write(f"rank {rise} {sum(sizes)} {max(sizes)}\n")
    destroy_process_group()


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def main(arguments: Sequence[str]) -> None:
    if arguments:
        how, folder = arguments
        _rank(how, Path(folder))
        return
    print(paper_table())
    with tempfile.TemporaryDirectory() as folder:
        print(measured_table(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])

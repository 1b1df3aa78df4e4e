"""`python -m bench.trainer.gpu_check`: how fast and how right the engine is on this GPU.

One optimizer step of a model of about 0.6e9 random weights in bfloat16, with and without
activation checkpointing, beside the plainest PyTorch loop on the same rows; and the fast
attentions against exact numbers. Ends with 0, with 1 when a kernel is off, with 2 when there is
no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.trainer.kernel_check import Kernel, kernels
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.engine import FsdpSettings, Learner, OptimSettings, shard
from tracegrad_trainer.engine.distributed import destroy_process_group, init_process_group
from tracegrad_trainer.engine.flops import flops
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.engine.peak_flops import peak_flops
from tracegrad_trainer.losses import preset


@dataclass(frozen=True, slots=True)
class Size:
    config: dict[str, int]
    rows: tuple[int, ...]  # tokens of each
    budget: int  # of a micro-batch


# As Qwen3-0.6B.
LARGE = Size(
    {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    rows=(4096, 3072, 3072, 2048, 2048, 1024, 512, 512),
    budget=8192,
)
TINY = Size(
    {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    rows=(40, 30, 20, 10),
    budget=60,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One way to take a step. None: did not fit, or is not known of this device."""

    name: str
    tokens_per_s: float | None
    peak_gib: float | None
    mfu: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device here", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    size = TINY if options.tiny else LARGE
    torch.manual_seed(0)
    found = kernels(device, torch.bfloat16)
    try:
        runs = _runs(size, device, options.steps)
    finally:
        destroy_process_group()
    if options.json:
        report = {"kernels": [asdict(one) for one in found], "runs": [asdict(one) for one in runs]}
        print(json.dumps(report))
    else:
        print("\n".join(_lines(found, runs, device)))
    return 0 if all(one.within(torch.bfloat16) for one in found) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and rows of a moment's work")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _runs(size: Size, device: torch.device, steps: int) -> list[Run]:
    made = _rows(size)
    operations = _operations(size, made)
    runs = []
    for checkpointing in (False, True):
        ways: dict[str, Callable[[], Callable[[], Any]]] = {
            "tracegrad": lambda c=checkpointing: _ours(size, made, device, c),  # type: ignore[misc]
            "plain loop": lambda c=checkpointing: _plain(size, made, device, c),  # type: ignore[misc]
        }
        for name, start in ways.items():
            words = f"{name}, {'blocks recomputed' if checkpointing else 'all activations kept'}"
            runs.append(_measured(words, start, sum(size.rows), operations, device, steps))
    return runs


def _measured(
    name: str,
    start: Callable[[], Callable[[], Any]],
    tokens: int,
    operations: float,
    device: torch.device,
    steps: int,
) -> Run:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        step = start()
        step()
        _wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(device)
    except torch.OutOfMemoryError:
        return Run(name, None, None, None)
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()  # models hold themselves in cycles
        if cuda:
            torch.cuda.empty_cache()
    seconds = (time.perf_counter() - began) / steps
    peak = peak_flops(device, torch.bfloat16)
    return Run(
        name,
        tokens / seconds,
        torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        operations / seconds / peak if peak else None,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ours(
    size: Size, made: Sequence[Row], device: torch.device, checkpointing: bool
) -> Callable[[], Any]:
    settings = FsdpSettings(
        device="cuda" if device.type == "cuda" else "cpu",
        compute_dtype="bfloat16",
        gradient_checkpointing=checkpointing,
        reshard=False,
    )
    destroy_process_group()
    mesh = init_process_group(settings)
    varlen = "tracegrad_varlen" if device.type == "cuda" else "tracegrad_packed"
    model = shard(prepare_model(_model(size, varlen), settings), mesh, settings)
    learner = Learner(model, mesh, preset("grpo"), OptimSettings(lr=1e-6), reshard=False)
    (batches,) = pack(made, ranks=1, budget=size.budget)
    return lambda: learner.train(batches, version=0)


def _plain(
    size: Size, made: Sequence[Row], device: torch.device, checkpointing: bool
) -> Callable[[], Any]:
    """A row at a time, all logits, autocast, AdamW: what anybody would write first."""
    model: Any = _model(size, "sdpa").to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    targets = sum(int(row.keep.sum()) for row in made)

    def step() -> None:
        for row in made:
            ids = torch.from_numpy(row.input_ids).long().to(device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[1:, None])[:, 0]
            ratio = torch.exp(logp - logp.detach())
            torch.autograd.backward(-ratio.sum() / targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _model(size: Size, attention: str) -> nn.Module:
    config = Qwen3Config(**size.config, tie_word_embeddings=True, max_position_embeddings=8192)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    return model


def _operations(size: Size, made: Sequence[Row]) -> float:
    with torch.device("meta"):
        model = _model(size, "sdpa")
    (batches,) = pack(made, ranks=1, budget=size.budget)
    return sum(flops(model, batch) for batch in batches)


def _rows(size: Size) -> list[Row]:
    """One turn each, of which all but the first token is trained."""
    rng = np.random.default_rng(0)
    made = []
    for i, tokens in enumerate(size.rows):
        mask = np.arange(tokens) > 0
        zeros = np.zeros(tokens, np.float32)
        made.append(
            Row(
                input_ids=rng.integers(0, size.config["vocab_size"], tokens).astype(np.int32),
                loss_mask=mask,
                keep=mask,
                rollout_logprobs=zeros - 10,
                policy_version=np.where(mask, 0, -1).astype(np.int32),
                turn_index=np.where(mask, 0, -1).astype(np.int32),
                temperature=zeros + 1,
                advantage=np.where(mask, 1, 0).astype(np.float32),
                reward=zeros,
                demonstration=np.zeros(tokens, np.bool_),
                rollout_id=str(i),
                group_id="0",
                turn_ids=(str(i),),
            )
        )
    return made


def _lines(found: Sequence[Kernel], runs: Sequence[Run], device: torch.device) -> list[str]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [f"on {where}, torch {torch.__version__}, bfloat16", ""]
    lines.append(f"{'attention':<18}{'output off':>12}{'gradients off':>16}")
    for one in found:
        off = "" if one.within(torch.bfloat16) else "  WRONG"
        lines.append(f"{one.name:<18}{one.output:>12.1e}{one.gradients:>16.1e}{off}")
    lines += ["", f"{'one step':<38}{'tokens/s':>12}{'peak GiB':>10}{'MFU':>8}"]
    for run in runs:
        if run.tokens_per_s is None:
            lines.append(f"{run.name:<38}{'does not fit':>12}")
            continue
        peak = "-" if run.peak_gib is None else f"{run.peak_gib:.1f}"
        mfu = "-" if run.mfu is None else f"{run.mfu:.1%}"
        lines.append(f"{run.name:<38}{run.tokens_per_s:>12,.0f}{peak:>10}{mfu:>8}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

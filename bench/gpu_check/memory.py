"""How near the estimate of memory, by which a start is refused, is to what a step takes; and rows
of 8k and 32k tokens in layers with windows, caps and sinks, whose memory must not grow with the
square of a row."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PretrainedConfig

from bench.gpu_check.check import Finding, Machine, in_a_line, judged
from bench.gpu_check.models import LARGE, TINY, forked, random_model, random_rows
from bench.gpu_check.speed import our_learner
from tracegrad_trainer.batches import micro_batch, pack
from tracegrad_trainer.engine import FsdpSettings, destroy_process_group
from tracegrad_trainer.engine.model.forward import to_inputs
from tracegrad_trainer.engine.model.memory import estimate_memory

# The estimate is good to a factor of two, and must not say too little by more than this.
LOW, HIGH = 0.5, 1.25
_WAYS: dict[str, dict[str, Any]] = {
    "all activations kept": {},
    "blocks recomputed": {"gradient_checkpointing": True},
    "parameters sharded again": {"reshard": True},
    "adapters": {"lora": {"rank": 16}},
    "offloaded": {"cpu_offload": True, "reshard": True},
}


def check_estimate(machine: Machine) -> Finding:
    if not machine.is_gpu:
        return Finding(verdict="not run", said="a CPU does not say what tensors took")
    size = TINY if machine.tiny else LARGE
    rows, shares = [], []
    for name, settings in _WAYS.items():
        try:
            measured, estimated = _step_memory(machine, settings)
        except Exception as error:
            rows.append([name, in_a_line(error), "", ""])
            continue
        finally:
            destroy_process_group()
        share = measured / estimated
        shares.append(share)
        rows.append([name, f"{measured / 2**30:.2f}", f"{estimated / 2**30:.2f}", f"{share:.2f}"])
    header = ("step", "measured GiB", "estimated GiB", "share")
    if not shares:
        return judged(False, f"{size.name}: no step was taken", header, rows)
    said = f"{size.name}: {min(shares):.2f} to {max(shares):.2f} of the estimate"
    right = len(shares) == len(_WAYS) and min(shares) >= LOW and max(shares) <= HIGH
    return judged(right, said, header, rows)


def _step_memory(machine: Machine, settings: dict[str, Any]) -> tuple[float, float]:
    size = TINY if machine.tiny else LARGE
    given = {"compute_dtype": "bfloat16", "reshard": False} | settings
    fsdp = FsdpSettings.model_validate({"device": "cuda", **given})
    meta = random_model(size, "sdpa", "meta")
    estimated = estimate_memory(meta, fsdp, ranks=1, tokens=size.budget).on_device
    gc.collect()
    torch.cuda.empty_cache()
    learner = our_learner(size, machine, **settings)
    # Not of drawing the model: in a run it comes in parts.
    torch.cuda.reset_peak_memory_stats(machine.device)
    made = random_rows(size.rows, size.config["vocab_size"])
    (batches,) = pack(made, ranks=1, budget=size.budget)
    for _ in range(2):  # the optimizer's state comes with the first
        learner.train(batches, version=0)
    return float(torch.cuda.max_memory_allocated(machine.device)), float(estimated)


def check_long_rows(machine: Machine) -> Finding:
    lengths = (64, 128) if machine.tiny else (8192, 32768)
    rows, square, failed = [], [], []
    for name, config in _layers(machine.tiny).items():
        for tree in (False, True):
            kind = f"{name}, a tree" if tree else name
            peaks: list[float] = []
            for tokens in lengths:
                try:
                    peak, seconds = _layer_memory(machine, config, tokens, tree)
                except Exception as error:
                    rows.append([kind, f"{tokens:,}", in_a_line(error), ""])
                    failed.append(kind)
                    break
                peaks += [] if peak is None else [peak]
                gib = "–" if peak is None else f"{peak / 2**30:.2f}"
                rows.append([kind, f"{tokens:,}", gib, f"{seconds:.2f}"])
            # Four times the tokens: four times the memory, never sixteen.
            if len(peaks) > 1 and peaks[-1] > 1.5 * peaks[0] * lengths[-1] / lengths[0]:
                square.append(kind)
    header = ("one layer, forward and backward", "tokens", "GiB", "s")
    if not machine.is_gpu and not failed:
        said = "a CPU does not say what tensors took"
        return Finding(verdict="not run", said=said, header=header, rows=rows)
    said = f"memory grows with the square of a row: {'; '.join(square)}" if square else ""
    said = said or "memory grows as a row does"
    said += f"; failed: {'; '.join(failed)}" if failed else ""
    return judged(not square and not failed, said, header, rows)


def _layers(tiny: bool) -> dict[str, PretrainedConfig]:
    sizes: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 1}
    if tiny:
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = {"layer_types": ["full_attention"]}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return {
        "Gemma 2 9B, cap": Gemma2Config(**_as_gemma(sizes, tiny), **kinds),
        "GPT-OSS 20B, sinks": GptOssConfig(**sizes, **experts, **kinds),
    }


def _as_gemma(sizes: dict[str, Any], tiny: bool) -> dict[str, Any]:
    if tiny:
        return sizes | {"query_pre_attn_scalar": 8}
    wide = {"hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    return sizes | wide | heads | {"query_pre_attn_scalar": 256}


def _layer_memory(
    machine: Machine, config: PretrainedConfig, tokens: int, tree: bool
) -> tuple[float | None, float]:
    """Bytes beyond the weights, seconds."""
    device = machine.device
    dtype = torch.bfloat16 if machine.is_gpu else torch.float32
    name = "tracegrad_varlen" if machine.is_gpu else "tracegrad_packed"
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name)
    model.to(device)
    [row] = random_rows((tokens,), 512)
    inputs = to_inputs(micro_batch([forked(row) if tree else row], [0]), model, device)
    arguments = {k: v for k, v in inputs.model.items() if k != "logits_to_keep"}
    began, peak = 0.0, None
    for _ in range(2):  # the first compiles
        model.zero_grad(set_to_none=True)
        gc.collect()
        if machine.is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if machine.is_gpu else 0
        machine.wait()
        began = time.perf_counter()
        model.base_model(**arguments).last_hidden_state.float().square().mean().backward()
        machine.wait()
        if machine.is_gpu:
            peak = float(torch.cuda.max_memory_allocated(device) - before)
    return peak, time.perf_counter() - began

"""What each rank does in `test_context_parallel`: `<folder>/context.json` gets what rank 0 saw."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.trainer.row_samples import rows
from support.trainer.tiny_models import CONFIGS, RECURRENT, make
from tracegrad_trainer.batches import MicroBatch, micro_batch, pack
from tracegrad_trainer.engine import FsdpSettings
from tracegrad_trainer.engine.context_parallel import ContextParallel, ContextParallelAttention
from tracegrad_trainer.engine.model import compile as compile_blocks
from tracegrad_trainer.engine.model import context_trial
from tracegrad_trainer.engine.model.context_trial import check_context_parallel, sharing_ranks
from tracegrad_trainer.engine.model.forward import forward, to_inputs
from tracegrad_trainer.engine.model.lm_head import choose_lm_head

CPU = torch.device("cpu")
# name -> settings of a variant of a model
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CONFIGS if name not in RECURRENT},
    "recomputed": ("qwen3", {"gradient_checkpointing": True}),
    "adapted": ("qwen3", {"lora": {"rank": 2}}),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    context = ContextParallel.of(mesh, mesh.size())
    assert context is not None
    batch = micro_batch(rows(5, seed=3), range(5))
    seen: dict[str, Any] = {
        name: apart(make(kind, **settings), batch, context)
        for name, (kind, settings) in VARIANTS.items()
    }
    seen["trees"] = apart(make("gemma2"), trees(), context)
    seen["one token a rank"] = apart(make("gpt_oss"), micro_batch(rows(1), [0]), context)
    seen["no targets"] = apart(make("qwen3"), micro_batch([], []), context)
    with patch.object(compile_blocks, "_BACKEND", "eager"):  # what is traced is the same
        for name, shared in (("compiled", batch), ("compiled, filled up", filling())):
            seen[name] = apart(make("qwen3", compile=True), shared, context)
    with patch.object(ContextParallelAttention, "_exchange", lambda _, x: x):
        seen["not exchanged"] = apart(make("qwen3"), batch, context)
    seen["said"] = {
        "fits": said(lambda: check_context_parallel(make("gpt_oss"), context, CPU)),
        "heads": said(lambda: check_context_parallel(three_heads(), context, CPU)),
        "state": said(lambda: check_context_parallel(make("qwen3_5"), context, CPU)),
        "mixes": said(lambda: check_context_parallel(mixing(), context, CPU)),
        "ranks": said(lambda: ContextParallel.of(mesh, 3)),
    }
    seen["chosen"] = chosen(mesh)
    if dist.get_rank() == 0:
        (folder / "context.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def chosen(mesh: DeviceMesh) -> dict[str, Any]:
    """What comes of `fsdp.context_parallel = "auto"`: the size, or what is said."""

    def size(model: nn.Module, recorded: int | None = None) -> int | str:
        try:
            found = sharing_ranks([model], mesh, FsdpSettings(device="cpu"), recorded)
        except ValueError as error:
            return str(error)
        return 1 if found is None else found.size

    seen: dict[str, Any] = {"CPU": size(make("qwen3"))}
    with patch.object(context_trial, "sharing_group", lambda *_: 2):  # as if on GPUs
        seen |= {"fits": size(make("qwen3")), "mixes": size(mixing())}
    # As on machines with different numbers of ranks.
    local = {"LOCAL_WORLD_SIZE": "4" if dist.get_rank() == 0 else "2"}
    with (
        patch.dict(os.environ, local),
        patch.object(context_trial, "sharing_group", lambda *given: given[-1]),
    ):
        seen["machines"] = size(make("qwen3"))
    return seen | {"recorded": size(make("qwen3"), 4), "no more": size(mixing(), 4)}


def apart(model: nn.Module, batch: MicroBatch, context: ContextParallel) -> list[float]:
    """Of log-probabilities and of gradients, how far those of a shared micro-batch are from those
    of one rank, as a share of their norm."""
    expected, gradients = _pass(model, batch, None)
    found, parts = _pass(model, batch, context)
    every = torch.cat([part.flatten() for part in parts.values()])
    dist.all_reduce(every)
    wanted = torch.cat([each.flatten() for each in gradients.values()])
    return [_share(found, expected), _share(every, wanted)]


def _share(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def _pass(
    model: nn.Module, batch: MicroBatch, context: ContextParallel | None
) -> tuple[Tensor, dict[str, Tensor]]:
    head = choose_lm_head(model, CPU)
    model.zero_grad()
    found = forward(
        model, to_inputs(batch, model, CPU, context), head, entropy_gradient=head.shape is not None
    )
    weight = torch.linspace(-1, 2, len(batch.target))
    loss = (found.policy_logprobs * weight).sum()
    if found.entropy.requires_grad:
        loss = loss + 0.1 * (found.entropy * weight).sum()
    loss.backward()
    kept = torch.stack([found.policy_logprobs.detach(), found.entropy.detach()])
    return kept, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def trees() -> MicroBatch:
    """A row with two branches behind a stem, and two that are sequences."""
    whole = rows(1, seed=4)[0]
    tokens = len(whole)
    stem, fork = tokens // 3, 2 * tokens // 3
    previous = np.arange(-1, tokens - 1, dtype=np.int32)
    previous[fork] = stem - 1
    position = np.arange(tokens, dtype=np.int32)
    position[fork:] -= fork - stem
    ends = np.full(tokens, tokens, np.int32)
    ends[stem:fork] = fork
    forked = replace(whole, position=position, previous=previous, subtree_end=ends)
    return micro_batch([forked, *rows(2, seed=1)], range(3))


def filling() -> MicroBatch:
    """What ranks without a row get, in slices of a token."""
    [[batch]] = pack(rows(1), ranks=2, budget=1000)[1:]
    assert batch.tokens < 4
    return batch


def three_heads() -> nn.Module:
    """Heads that four ranks cannot share."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    with patch.dict(CONFIGS, {"odd": lambda: type(CONFIGS["llama"]())(**_changed(sizes))}):
        return make("odd")


def _changed(sizes: dict[str, int]) -> dict[str, Any]:
    kept = CONFIGS["llama"]().to_dict()
    return {k: v for k, v in kept.items() if k not in ("head_dim", "model_type")} | sizes


def mixing() -> nn.Module:
    """A block sees the token before, beside its attention."""
    model: Any = make("llama")
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, given: (given[0] + given[0].roll(1, 1), *given[1:]))
    found: nn.Module = model
    return found


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""

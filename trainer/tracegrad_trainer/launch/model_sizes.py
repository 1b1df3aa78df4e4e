"""What a model takes to serve and to train, from its config alone (no weights are read)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from tracegrad_trainer.config.push_transport import check_transport, choose_transport
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.config.vllm import CPU_KV_BYTES, VllmSettings
from tracegrad_trainer.engine.checkpoint.untrained_parts import elements_beside
from tracegrad_trainer.engine.config import FsdpSettings, LoraSettings
from tracegrad_trainer.engine.model.hf_config import layer_configs, query_heads
from tracegrad_trainer.engine.model.memory import estimate_memory, meta_model
from tracegrad_trainer.launch.placement import AND, ModelSizes, PlacementRequest, RankMemory

# The served version of a push's files and the one under way (`WeightFiles`).
_PUSH_VERSIONS = 2
# vLLM's options that memory is planned by: the setting to use in their place, if there is one.
_PLANNED: dict[str, str | None] = {
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--data-parallel-size": "data_parallel",
    "-dp": "data_parallel",
    "--pipeline-parallel-size": None,
    "-pp": None,
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
}


def read_sizes(settings: TrainerSettings, *, gpus: int) -> ModelSizes:
    """Of the model in its folder, for up to so many ranks (0: on a CPU).

    Raises:
        ValueError: there is no such model.
    """
    model = meta_model(settings.model)
    sizes = model_sizes(model, settings, gpus=gpus)
    itemsize = _served_itemsize(settings.vllm, gpus > 0 and not settings.vllm.on_cpu)
    beside = itemsize * elements_beside(settings.model, model)
    return replace(sizes, served=sizes.served + beside, beside=beside)


def model_sizes(model: nn.Module, settings: TrainerSettings, *, gpus: int) -> ModelSizes:
    """`model` may be on the meta device."""
    config: Any = model.config
    layers = layer_configs(config)
    text = config.get_text_config()
    count = sum(p.numel() for p in model.parameters())
    on_gpu = gpus > 0 and not settings.vllm.on_cpu
    itemsize = _served_itemsize(settings.vllm, on_gpu)
    cached = [_kv_values(layer) for layer in layers]
    longest = settings.vllm.max_model_len or getattr(text, "max_position_embeddings", None) or 4096
    tokens = settings.tokens_of_a_rank
    most = max(gpus, settings.ranks)

    def ranks(fsdp: FsdpSettings) -> dict[int, RankMemory]:
        kind = "cuda" if gpus and fsdp.device != "cpu" else "cpu"
        placed = fsdp.model_copy(update={"device": kind})
        reference = settings.needs_reference_model
        return {
            n: _rank_memory(
                model,
                placed,
                ranks=n,
                tokens=tokens,
                reference=reference,
                moment_bytes=settings.optim.moment_bytes,
            )
            for n in range(1, most + 1)
        }

    return ModelSizes(
        parameters=count,
        served=itemsize * count - (itemsize - 1) * _rounded(model, settings.vllm),
        kv_bytes=(1 if settings.vllm.caches_fp8 else itemsize) * sum(n for n, _ in cached),
        kv_heads=math.gcd(*(heads for _, heads in cached)),
        heads=math.gcd(*(query_heads(layer)[0] for layer in layers)),
        inner=math.gcd(*(width for layer in layers for width in _mlp_widths(layer))),
        vocabulary=text.vocab_size,
        max_model_len=longest,
        pushed=_PUSH_VERSIONS * itemsize * count,
        ranks=ranks(settings.fsdp),
        ways={name: ranks(fsdp) for name, fsdp in _lighter(settings.fsdp).items()} if gpus else {},
        pushed_to_memory=_in_memory(settings.push.folder),
        largest=itemsize * max(map(_pushed_elements, model.parameters())),
        experts=itemsize * _expert_elements(model),
    )


def placement_request(settings: TrainerSettings, *, gpus: int) -> PlacementRequest:
    """What the settings fix, on a machine with so many GPUs.

    Raises:
        ValueError: vllm.extra_args has what memory is planned by, or weights cannot be pushed as
            they are to be.
    """
    vllm, asked = settings.vllm, settings.gpus
    for option in vllm.extra_args:
        word = option.partition("=")[0]
        if (word := word.replace("_", "-")) in _PLANNED:
            instead = f"set vllm.{name} instead, or " if (name := _PLANNED[word]) else ""
            raise ValueError(
                f"vllm.extra_args: GPUs and their memory are planned by {option}, which no plan"
                f" sees there: {instead}leave it out"
            )
    on_gpu = gpus > 0 and not vllm.on_cpu and not vllm.is_attached
    train_on_gpu = gpus > 0 and settings.fsdp.device != "cpu"
    if not vllm.is_attached:
        check_transport(settings.push.transport, engine_on_gpu=on_gpu)
    kv = vllm.kv_cache_memory_bytes or (None if on_gpu else CPU_KV_BYTES)
    return PlacementRequest(
        vllm=asked.vllm_gpus,
        train=asked.train_gpus,
        share=asked.share,
        ranks=settings.ranks if "ranks" in settings.model_fields_set else None,
        tensor_parallel=vllm.tensor_parallel,
        data_parallel=vllm.data_parallel,
        kv_cache_bytes=kv,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        max_num_seqs=vllm.sequences,
        sleep_level=asked.planned_sleep_level,
        # What vLLM 0.32 loads for `thinking_token_budget` is no weight, and no push brings it.
        sleep_level_asked=asked.sleep_level is not None or vllm.reasoning_parser is not None,
        rank_multiple=settings.fsdp.rank_multiple,
        engine_here=not vllm.is_attached,
        engine_on_gpu=on_gpu,
        train_on_gpu=train_on_gpu,
        transport=choose_transport(
            settings, engine_on_gpu=gpus > 0 and not vllm.on_cpu, train_on_gpu=train_on_gpu
        ),
        transport_asked=settings.push.transport != "auto",
    )


def _rank_memory(
    model: nn.Module, fsdp: FsdpSettings, *, ranks: int, tokens: int, **more: Any
) -> RankMemory:
    found = estimate_memory(model, fsdp, ranks=ranks, tokens=tokens, **more)
    return RankMemory(
        state=found.state,
        gathered=found.whole,
        activations=found.activations + found.backward + found.scores,
        host=max(found.loading, found.copied) + found.waiting,
        gradients=found.gradients,
        offloaded=found.offloaded,
    )


def _kv_values(layer: Any) -> tuple[int, int]:
    """(values a token in the cache, heads that they can be divided by) of a layer. Sliding windows
    count as long as their sequence: vLLM keeps one size of block for layers of both kinds."""
    latent = getattr(layer, "kv_lora_rank", None)
    if latent:  # one for all heads, on every GPU (DeepSeek's MLA)
        return latent + (getattr(layer, "qk_rope_head_dim", None) or 0), 1
    number, width = query_heads(layer)
    heads = getattr(layer, "num_key_value_heads", None) or number
    return 2 * heads * width, heads


def _served_itemsize(vllm: VllmSettings, on_gpu: bool) -> int:
    """Of weights that are not rounded to 8 bits, and of what is cached. vLLM's auto makes two bytes
    of float32."""
    if vllm.dtype is None and not on_gpu:
        return 4
    return 4 if vllm.weights_dtype == "float32" else 2


def _rounded(model: nn.Module, vllm: VllmSettings) -> int:
    """How many weights vLLM keeps in 8 bits: those of linear layers and experts. Embeddings and
    heads stay as they are; scales are not counted."""
    if not vllm.rounds_weights:
        return 0
    whole = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    kept = {id(p) for layer in whole if layer is not None for p in layer.parameters()}
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in kept)


def _mlp_widths(layer: Any) -> list[int]:
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    return [width for name in names if isinstance(width := getattr(layer, name, None), int)]


def _pushed_elements(parameter: nn.Parameter) -> int:
    """Of one tensor in a push: a mixture's experts, which are stacked here, come one by one."""
    stacked = parameter.shape[0] if parameter.ndim > 2 else 1
    return parameter.numel() // stacked


def _expert_elements(model: nn.Module) -> int:
    """Of the block with the most: its experts are stacked in one module."""
    sums = (
        sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 2)
        for module in model.modules()
    )
    return max(sums, default=0)


def _in_memory(folder: Path | None) -> bool:
    """Whether the files of a push, which go to shared memory if nothing is said, are there."""
    return folder is None or folder.resolve().is_relative_to("/dev/shm")


def _lighter(fsdp: FsdpSettings) -> dict[str, FsdpSettings]:
    """Settings that take less memory, the cheapest in time first."""
    found: dict[str, dict[str, object]] = {}
    if fsdp.gradient_checkpointing is not True:
        found["fsdp.gradient_checkpointing = true"] = {"gradient_checkpointing": True}
    if fsdp.lora is None:
        found["[fsdp.lora]"] = {"lora": LoraSettings()}
    if not fsdp.cpu_offload:
        found["fsdp.cpu_offload = true"] = {"cpu_offload": True}
    lighter = {}
    for number in range(1, len(found) + 1):
        for names in itertools.combinations(found, number):
            update = {key: value for name in names for key, value in found[name].items()}
            lighter[AND.join(names)] = fsdp.model_copy(update=update)
    return lighter

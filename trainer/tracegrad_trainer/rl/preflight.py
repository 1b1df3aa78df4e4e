"""What can be known to be wrong before anything starts, one line each."""

from __future__ import annotations

import os
from typing import Any

import httpx
from torch import nn

from tracegrad.store import Store
from tracegrad.store.read.rollouts import count_untrained
from tracegrad.turn_tree import common_prefix
from tracegrad_trainer.config.trainer import TrainerSettings, merged_reason
from tracegrad_trainer.config.vllm import asked_quantization
from tracegrad_trainer.engine.attention.dispatch import OURS, VARLEN, choose_attention
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import (
    check_replicas,
    compute_dtype,
    not_divisible,
    pick_device,
)
from tracegrad_trainer.engine.model import memory
from tracegrad_trainer.engine.model.compile import check_triton
from tracegrad_trainer.engine.model.context_trial import check_heads
from tracegrad_trainer.engine.model.hf_config import layer_configs, score_transforms
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.engine.model.reference import reference_layout
from tracegrad_trainer.engine.model.sharded_load import empty_model
from tracegrad_trainer.inference.m2n_push import m2n_missing
from tracegrad_trainer.rl.committed_checkpoint import check_served_model, resume_checkpoint
from tracegrad_trainer.utils.network import http_client

# Letters of several scripts, digits, spaces, code, and what looks like a special token.
PROBE = "Olá, Welt! 你好 — 12345  \n\tdef f(x): return x**2  # <|im_start|>user</s> 🙂"
TIMEOUT_S = 30.0
# Surrogates of `trainer sft`: what they train on is chosen otherwise than a batch.
STORED = ("sft", "dpo", "kto")


def check_before_training(settings: TrainerSettings, store: Store, free: int | None = None) -> None:
    """The model fits and has its own tokenizer, it is the one whose versions the store has, and the
    last step's checkpoint is there.

    `free`: bytes that a rank may have on its GPU; default: what is free there now.

    Raises:
        ValueError: the objective, the attention, the model or its tokenizer.
        CheckpointError: the checkpoint; names the part.
    """
    preset = settings.objective.preset
    if settings.objective.surrogate in STORED:
        raise ValueError(
            f"objective.preset = {preset!r} learns from stored traces: use trainer sft --preset"
            f" {preset}"
        )
    choose_attention(settings.fsdp, pick_device(settings.fsdp))
    check_precision(settings)
    check_memory(settings, vocabulary=len(tokenizer_of(settings)), free=free)
    resume_checkpoint(store, settings)
    check_served_model(store, settings)


def check_memory(
    settings: TrainerSettings, vocabulary: int | None = None, free: int | None = None
) -> None:
    """Whether the model, and a reference model beside it, fit into this machine's memory, and
    `[fsdp]` fits the model.

    Raises:
        ValueError: they do not, or the model embeds fewer tokens than `vocabulary`.
    """
    world = int(os.environ.get("WORLD_SIZE", settings.ranks))
    if problem := not_divisible(world, "context_parallel", settings.fsdp.context_ranks):
        raise ValueError(problem)
    check_replicas(world, settings.fsdp.replicas)
    if settings.push.transport == "nccl_m2n" and (lacks := m2n_missing()):
        raise ValueError(f"push.transport = 'nccl_m2n' needs {lacks}; set push.transport = 'nccl'")
    check_layout(settings)
    memory.check_fits_memory(
        settings.model,
        settings.fsdp,
        ranks=world,
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        tokens=settings.tokens_of_a_rank,
        vocabulary=vocabulary,
        free=free,
        reference=settings.needs_reference_model,
        moment_bytes=settings.optim.moment_bytes,
    )


def check_layout(settings: TrainerSettings) -> None:
    """Whether the model, and a reference model, can be laid out as `[fsdp]` says; what ranks do
    first, without storage.

    Raises:
        ValueError: names the setting that the model does not go with.
    """
    laid_out = [(settings.model, settings.fsdp)]
    if settings.needs_reference_model and settings.reference_folder != settings.model:
        laid_out.append((settings.reference_folder, reference_layout(settings.fsdp)))
    for folder, fsdp in laid_out:
        attention = choose_attention(fsdp, pick_device(fsdp))
        model = prepare_model(empty_model(folder, attention), fsdp)
        trees = settings.batches.shared_prefix == "tree"
        if pick_device(fsdp).type == "cuda" and (what := needs_triton(model, fsdp, trees=trees)):
            check_triton(what)
        if fsdp.context_ranks > 1:
            check_heads(model, fsdp.context_ranks)


def needs_triton(model: nn.Module, fsdp: FsdpSettings, *, trees: bool) -> str | None:
    """What of a run on a GPU has kernels that Triton compiles; None: nothing."""
    config: Any = model.config
    name = config._attn_implementation
    if fsdp.compile:
        return "fsdp.compile = true"
    if trees and name in OURS.values():
        return "batches.shared_prefix = 'tree'"
    forms = (form for layer in layer_configs(config) for form in score_transforms(layer))
    if name == VARLEN and not all(form.plain for form in forms):
        return f"the attention of {type(model).__name__} (soft caps or sinks)"
    return None


def check_store_has_groups(settings: TrainerSettings, store: Store) -> None:
    """Whether what the store holds can be grouped at all.

    Raises:
        ValueError: the objective compares rollouts of one task, and none has a task.
    """
    if settings.batches.group_size == 1:
        return
    with store.reading() as connection:
        every, with_task = count_untrained(connection)
    if every and not with_task:
        raise ValueError(
            f"objective.preset = {settings.objective.preset!r} compares rollouts of one task with"
            f" each other, and none of the {every} that wait in the store has a task: name it when"
            " a rollout is opened, or set objective.advantage = 'running' and"
            " batches.group_size = 1"
        )


def check_precision(settings: TrainerSettings) -> None:
    """Whether what is served in fewer bits than it is trained in can be checked and is corrected.

    Raises:
        ValueError: names the setting that is wrong.
    """
    quantization = asked_quantization(vars(settings.vllm))
    if quantization is not None and "fp8" not in quantization:
        raise ValueError(
            f"vllm.extra_args: --quantization {quantization}: how far it rounds is not known here,"
            " so no push could be checked; set vllm.quantization = 'fp8', or leave it out"
        )
    if settings.vllm.serving_dtype == "fp8" and not settings.objective.bounds_mismatch:
        raise ValueError(
            "vllm serves in fp8 (vllm.quantization, or vllm.extra_args), and objective.correction ="
            " 'none' takes what it samples for the trained policy's own: set objective.correction ="
            " 'tis', or serve without fp8"
        )


def describe_precision(settings: TrainerSettings) -> str:
    """In which numbers the policy is trained and served, and what is done about the difference."""
    fsdp, objective = settings.fsdp, settings.objective
    dtype = str(compute_dtype(fsdp)).removeprefix("torch.")
    products = {"high": "TF32", "medium": "bfloat16"}.get(fsdp.float32_matmul)
    if dtype == "float32" and products:
        dtype += f" with products in {products}"
    attention = choose_attention(fsdp, pick_device(fsdp)).removeprefix("tracegrad_")
    if objective.correction != "none":
        level, cap = objective.correction_level, objective.correction_cap
        corrected = f"correction {objective.correction} by {level}, at most {cap:g}"
    elif objective.bounds_mismatch:
        corrected = f"surrogate {objective.surrogate} bounds the ratio itself"
    else:
        corrected = "no correction of the difference"
    return (
        f"precision: trains in {dtype} (weights and sums of gradients in float32), attention"
        f" {attention}; vLLM serves {settings.vllm.serving_dtype}; {corrected}"
    )


def describe_lora_push(settings: TrainerSettings) -> str | None:
    """What a push of adapters carries, and why; None: there are no adapters."""
    if settings.fsdp.lora is None:
        return None
    reason = merged_reason(settings)
    if reason is not None:
        return f"pushes: the whole weights, adapters merged in ({reason})"
    return "pushes: the adapter alone, which vLLM serves with the model"


def check_served_tokenizer(settings: TrainerSettings) -> None:
    """Whether every engine reads text as the model folder's tokenizer does.

    An engine that cannot be asked (it has no /tokenize) is taken at its word: the first push's
    probe compares log-probabilities anyway.

    Raises:
        ValueError: it does not; names where they part.
    """
    tokenizer = tokenizer_of(settings)
    ours = tokenizer.encode(PROBE, add_special_tokens=False)
    last = len(tokenizer) - 1
    for url in settings.engine_urls:
        asked = {"prompt": PROBE, "add_special_tokens": False}
        theirs = _ask(settings, url, "/tokenize", asked, "tokens")
        if theirs is not None and theirs != ours:
            where = common_prefix(ours, theirs)
            raise ValueError(_not_the_engines(settings, url, f"token {where} of a text differs"))
        served = _ask(settings, url, "/detokenize", {"tokens": [last]}, "prompt")
        if served is not None and served != tokenizer.decode([last]):
            how = f"token {last}, its last one, differs"
            raise ValueError(_not_the_engines(settings, url, how))


def tokenizer_of(settings: TrainerSettings) -> Any:
    """Raises ValueError: the model folder has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(settings.model)
    except Exception as error:  # tokenizers raises plain Exception too
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model = {str(settings.model)!r}: its tokenizer cannot be loaded: {line}"
        ) from error


def _ask(
    settings: TrainerSettings, url: str, route: str, request: dict[str, Any], field: str
) -> Any:
    """A field of the engine's answer; None: it does not know the route."""
    try:
        with http_client(url, timeout_s=TIMEOUT_S) as client:
            served = settings.vllm.served_model_name
            answer = client.post(route, json={"model": served, **request})
        if answer.status_code in (404, 405, 501):
            return None
        answer.raise_for_status()
        return answer.json()[field]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ValueError(f"vllm: {url}{route} does not answer: {error}") from error


def _not_the_engines(settings: TrainerSettings, url: str, how: str) -> str:
    return (
        f"model = {str(settings.model)!r}: its tokenizer is not the engine's: {how}; vLLM at"
        f" {url} must serve the tokenizer of the folder that is trained"
    )

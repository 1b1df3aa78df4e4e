"""Which head a model gets: the chunked one wherever it computes what the model itself does.

Some models do more than a linear layer behind their body: logits are scaled (Cohere, Granite,
Falcon-H1), softly capped (Gemma), or something not known here. What the config holds
of that is applied, and then compared with the model, on large hidden states: a cap does not show
on near-zero logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tracegrad_trainer.batches.micro_batch import empty_micro_batch
from tracegrad_trainer.engine.model.chunked_logprobs import LogitTransform
from tracegrad_trainer.engine.model.forward import LmHead, model_arguments, run_inside_forward

# Of the forward that is tried; or logits, as wide as the vocabulary.
HiddenStates = Float[Tensor, "1 tokens hidden"]

_TOKENS = 2  # of the forward that is tried
_LOUD = 100.0  # the largest logit of it, scaled
# Largest difference of logits, as a share of the largest: of float32, of bfloat16.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_COARSE = 0.03

# Names in configs -> what they do to logits.
_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda x: x,  # Cohere
    "logits_scaling": lambda x: 1 / x,  # Granite
    "lm_head_multiplier": lambda x: x,  # Falcon-H1
}
_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma; RecurrentGemma


@torch.no_grad()
def choose_lm_head(
    model: nn.Module, device: torch.device, *, elements: int | None = None
) -> LmHead:
    """The model's head, tried; on all ranks at once. `elements` as in `chunked_logprobs`."""
    shape = logit_transform_of(model)
    why = _unusual(model)
    dtype, difference = run_inside_forward(
        model, lambda whole: (_dtype(whole), why or _difference(whole, shape, device))
    )
    return LmHead(None if difference else shape, difference or "", elements, dtype)


def logit_transform_of(model: Any) -> LogitTransform:
    """What is done to its logits, by the model's config."""
    config = model.config.get_text_config()
    scale, cap = 1.0, None
    for name, read in _SCALES.items():
        if given := getattr(config, name, None):
            scale *= read(float(given))
    for name in _CAPS:
        if given := getattr(config, name, None):
            cap = float(given)
    return LogitTransform(scale, cap)


def _dtype(model: Any) -> torch.dtype:
    found: torch.dtype = model.get_input_embeddings().weight.dtype
    return found


def _unusual(model: Any) -> str | None:
    last = model.get_output_embeddings()
    if model.base_model is model:
        return "its body cannot be called without its head"
    # A subclass, an adapter or a hook may change what comes out at any later step.
    if type(last) is not nn.Linear:
        return f"its head is a {type(last).__name__}, not a linear layer"
    if last._forward_hooks or last._forward_pre_hooks:
        return "its head has hooks"
    return None


def _difference(model: Any, shape: LogitTransform, device: torch.device) -> str | None:
    """What the model does between body and logits that `shape` does not say; None: nothing."""
    ids = torch.arange(_TOKENS, device=device)[None]
    given = {"input_ids": ids, "position_ids": ids, "use_cache": False}
    given |= model_arguments(model, empty_micro_batch(), device)
    body = model.base_model(**given).last_hidden_state
    last = model.get_output_embeddings()
    if isinstance(last.weight, DTensor):
        return "its head is sharded apart from the rest"
    with _louder(last, _LOUD / shape.scale) as seen:
        logits = model.forward(**given).logits
    quiet, loud = seen
    expected = shape.apply_(last(loud).float())
    if not _alike(body, quiet, last.weight.dtype):
        return "it changes what its body says before the head"
    if not _alike(logits, expected, last.weight.dtype):
        return "it does something to its logits that is not known here"
    return None


@contextmanager
def _louder(last: nn.Linear, most: float) -> Iterator[list[HiddenStates]]:
    """Within, the head gets hidden states whose largest logit is `most`; the list has what it
    would have got, and what it got."""
    seen: list[HiddenStates] = []

    def swap(_: nn.Module, given: tuple[HiddenStates, ...]) -> tuple[HiddenStates, ...]:
        hidden = given[0]
        each = torch.arange(hidden.numel(), device=hidden.device, dtype=torch.float32)
        other = torch.sin(each * math.sqrt(2)).view(hidden.shape).to(hidden.dtype)
        highest = (other @ last.weight.t()).abs().amax().float().clamp(min=1e-9)
        seen[:] = hidden, (other.float() * (most / highest)).to(hidden.dtype)
        return seen[1], *given[1:]

    hook = last.register_forward_pre_hook(swap)
    try:
        yield seen
    finally:
        hook.remove()


def _alike(a: HiddenStates, b: Float[Tensor, "1 _ _"], dtype: torch.dtype) -> bool:
    if a.shape != b.shape:
        return False
    apart = (a.float() - b.float()).abs().amax()
    return bool(apart <= _TOLERANCE.get(dtype, _COARSE) * b.float().abs().amax().clamp(min=1e-9))

"""The bounds on a push against real models in float32, bfloat16 and rounded to fp8.

What is served is sampled token by token with a KV cache; the trainer's forward is of whole rows in
its own dtype. A right push stays well within the bounds of the coarser one, and a wrong one does
not. fp8 is simulated: weights rounded to e4m3 with a scale a tensor, activations with one a token,
as vLLM's fp8_per_tensor does it; the products are of bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.trainer.tiny_model import perturb, tiny_model
from tracegrad_trainer.inference.logprob_probe import ProbeMismatchError, compare_logprobs
from tracegrad_trainer.inference.publish import PROBE_PROMPTS
from tracegrad_trainer.losses.logprob_gap import BOUNDS, LogprobGap, coarser, precision_of

VOCABULARY = 300
PROMPT_TOKENS, SAMPLED = 24, 32
HIGHEST = float(torch.finfo(torch.float8_e4m3fn).max)
# Trainer and engine.
PAIRS = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "fp8"),
]


def rounded(values: Tensor, dim: int | None = None) -> Tensor:
    """To e4m3 and back, with one scale or one along `dim`."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = largest.float().clamp(min=1e-12) / HIGHEST
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def as_computed_in(model: PreTrainedModel, dtype: str) -> Any:
    made = copy.deepcopy(model)
    if dtype != "float32":
        made = made.to(torch.bfloat16)  # type: ignore[arg-type]
    if dtype == "fp8":
        for name, layer in made.named_modules():
            if isinstance(layer, nn.Linear) and "lm_head" not in name:
                layer.weight.data = rounded(layer.weight.data)
                layer.register_forward_pre_hook(lambda _, given: (rounded(given[0], -1),))
    return made


@torch.no_grad()
def gap_of(served: Any, trainer: Any, allowed: Any) -> LogprobGap:
    torch.manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (PROBE_PROMPTS, PROMPT_TOKENS))
    told = served.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=SAMPLED,
        min_new_tokens=SAMPLED,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    ids = told.sequences[:, PROMPT_TOKENS:, None]
    before = torch.stack(told.logits, 1)
    after = trainer(told.sequences).logits[:, PROMPT_TOKENS - 1 : -1]
    of_both = [
        logits.float().log_softmax(-1).gather(-1, ids).flatten().tolist()
        for logits in (before, after)
    ]
    return compare_logprobs(*of_both, allowed)


@pytest.fixture(scope="module")
def policies() -> tuple[PreTrainedModel, PreTrainedModel]:
    """As it was served before the push, and as it is trained now."""
    old = tiny_model(VOCABULARY)
    return old, perturb(copy.deepcopy(old), seed=1)


@pytest.mark.parametrize(("trained", "serving"), PAIRS)
def test_a_right_push_is_well_within_the_bounds(
    policies: tuple[PreTrainedModel, PreTrainedModel], trained: str, serving: str
) -> None:
    _, new = policies
    precision = coarser(precision_of(trained), precision_of(serving))
    gap = gap_of(as_computed_in(new, serving), as_computed_in(new, trained), precision)
    bounds = BOUNDS[precision]
    assert gap.tokens == PROBE_PROMPTS * SAMPLED
    assert 0 < gap.p50 < bounds.p50 / 1.8
    assert gap.p99 < bounds.p99 / 1.8
    assert gap.mean < bounds.mean / 1.8


def block_stale(old: Any, new: Any, number: int) -> Any:
    made = copy.deepcopy(new)
    made.model.layers[number].load_state_dict(old.model.layers[number].state_dict())
    return made


def embedding_stale(old: Any, new: Any) -> Any:
    made = copy.deepcopy(new)
    made.model.embed_tokens.load_state_dict(old.model.embed_tokens.state_dict())
    return made


def scaled(old: Any, new: Any, factor: float) -> Any:
    """One matrix with a wrong scale."""
    made = copy.deepcopy(new)
    made.model.layers[1].mlp.down_proj.weight.data *= factor
    return made


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "first block stale": lambda old, new: block_stale(old, new, 0),
    "last block stale": lambda old, new: block_stale(old, new, 1),
    "embedding stale": embedding_stale,
    "scale doubled": lambda old, new: scaled(old, new, 2.0),
    "matrix not loaded": lambda old, new: scaled(old, new, 0.0),
    "pushed elsewhere": lambda old, new: old,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("trained", "serving"), PAIRS)
def test_what_is_served_wrongly_is_beyond_them(
    policies: tuple[PreTrainedModel, PreTrainedModel], trained: str, serving: str, wrong: str
) -> None:
    old, new = policies
    precision = coarser(precision_of(trained), precision_of(serving))
    served = as_computed_in(WRONG[wrong](old, new), serving)
    with pytest.raises(ProbeMismatchError, match="nats in the median") as error:
        gap_of(served, as_computed_in(new, trained), precision)
    assert error.value.gap.p50 > BOUNDS[precision].p50


def test_an_engine_in_bfloat16_is_beyond_the_bounds_of_float32(
    policies: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """What a trainer in float32 took for a fault, when only its own dtype was looked at."""
    _, new = policies
    with pytest.raises(ProbeMismatchError, match="more than float32 rounds"):
        gap_of(as_computed_in(new, "bfloat16"), new, "float32")
    with pytest.raises(ProbeMismatchError, match="more than bfloat16 rounds"):
        gap_of(as_computed_in(new, "fp8"), new, "bfloat16")

"""Which head a model gets, and that it says what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3MoeConfig,
)

from support.trainer.row_samples import VOCABULARY, rows, tiny_model
from support.trainer.tiny_model import tiny_sizes
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine import FsdpSettings, build_model, shard
from tracegrad_trainer.engine.model import value_head as value_head
from tracegrad_trainer.engine.model.chunked_logprobs import IDENTITY, LogitTransform
from tracegrad_trainer.engine.model.forward import (
    ForwardOutput,
    LmHead,
    forward,
    to_inputs,
    values_of,
)
from tracegrad_trainer.engine.model.lm_head import choose_lm_head

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
TINY = tiny_sizes(VOCABULARY, initializer_range=0.02, pad_token_id=0)
MODELS = {
    "llama": (LlamaConfig(**TINY), IDENTITY),
    "tied": (LlamaConfig(**TINY, tie_word_embeddings=True), IDENTITY),
    "gemma2": (
        Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=30.0),
        LogitTransform(cap=30.0),
    ),
    "cohere": (CohereConfig(**TINY, logit_scale=0.0625), LogitTransform(scale=0.0625)),
    "granite": (GraniteConfig(**TINY, logits_scaling=8.0), LogitTransform(scale=0.125)),
    "moe": (
        Qwen3MoeConfig(
            **TINY, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        IDENTITY,
    ),
    "opt": (
        OPTConfig(
            **{
                k: v
                for k, v in TINY.items()
                if k not in ("intermediate_size", "num_key_value_heads")
            },
            ffn_dim=48,
            word_embed_proj_dim=16,
        ),
        IDENTITY,
    ),
}


def made(config: Any, *, loud: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if loud:  # logits that a cap acts on
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(50)  # type: ignore[operator]
    return model.eval()


def batch() -> Any:
    made_rows = rows(5)
    return micro_batch(made_rows, range(5))


def both(model: nn.Module, head: LmHead) -> tuple[ForwardOutput, ForwardOutput]:
    inputs = to_inputs(batch(), model, CPU)
    return forward(model, inputs, head), forward(model, inputs, LmHead(None, "to compare"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_head_that_is_chosen_says_what_the_model_says(name: str, sharded: bool) -> None:
    config, shape = MODELS[name]
    model = made(config, loud=name == "gemma2")
    if sharded:
        model = shard(model, init_device_mesh("cpu", (1,)), FsdpSettings(device="cpu"))
    head = choose_lm_head(model, CPU)
    assert (head.shape, head.reason) == (shape, "")
    ours, plain = both(model, head)
    torch.testing.assert_close(ours.policy_logprobs, plain.policy_logprobs, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.entropy, plain.entropy, rtol=2e-5, atol=2e-5)


def gradients(model: nn.Module, logp: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["tied", "gemma2", "cohere"])
def test_gradients_reach_every_weight_alike(name: str) -> None:
    config, _ = MODELS[name]
    model = made(config, loud=name == "gemma2").double()
    ours, plain = both(model, choose_lm_head(model, CPU))
    mine, expected = gradients(model, ours.policy_logprobs), gradients(model, plain.policy_logprobs)
    assert list(mine) == list(expected)
    for key in expected:
        torch.testing.assert_close(mine[key], expected[key], rtol=1e-4, atol=1e-6)


def test_a_model_that_does_something_else_to_its_logits_makes_them_itself() -> None:
    model: Any = made(LlamaConfig(**TINY))
    own = model.forward

    def capped(*given: Any, **named: Any) -> Any:
        said = own(*given, **named)
        said.logits = 80 * torch.tanh(said.logits / 80)
        return said

    model.forward = capped
    head = choose_lm_head(model, CPU)
    assert head.shape is None
    assert head.reason == "it does something to its logits that is not known here"
    inputs = to_inputs(batch(), model, CPU)
    expected = capped(**inputs.model).logits[0] / inputs.temperature[:, None]
    expected = expected.log_softmax(-1).gather(-1, inputs.labels[:, None])[:, 0]
    torch.testing.assert_close(forward(model, inputs, head).policy_logprobs, expected)


def test_a_model_that_changes_hidden_states_before_its_head_makes_logits_itself() -> None:
    model: Any = made(LlamaConfig(**TINY))
    own = model.forward

    def dimmed(*given: Any, **named: Any) -> Any:
        hook = model.model.register_forward_hook(
            lambda _, __, said: type(said)(last_hidden_state=said.last_hidden_state * 0.5)
        )
        try:
            return own(*given, **named)
        finally:
            hook.remove()

    model.forward = dimmed
    assert choose_lm_head(model, CPU).reason == "it changes what its body says before the head"


def test_a_config_that_lies_about_its_scale_is_found_out() -> None:
    model: Any = made(LlamaConfig(**TINY))
    model.config.logit_scale = 0.5
    assert choose_lm_head(model, CPU).shape is None


def test_an_adapted_head_is_asked_through_the_model(tmp_path: Path) -> None:
    settings = FsdpSettings(device="cpu", lora={"rank": 2, "targets": ("q_proj", "lm_head")})  # type: ignore[arg-type]
    model: Any = build_model(tiny_model(tmp_path), settings)
    head = choose_lm_head(model, CPU)
    assert head.shape is None
    assert "not a linear layer" in head.reason
    with torch.no_grad():
        model.lm_head.lora_B["default"].weight.normal_()
    inputs = to_inputs(batch(), model, CPU)
    logits = model(**inputs.model).logits[0] / inputs.temperature[:, None]
    expected = logits.log_softmax(-1).gather(-1, inputs.labels[:, None])[:, 0]
    torch.testing.assert_close(forward(model, inputs, head).policy_logprobs, expected)


def test_half_precision_is_told_apart_from_another_head(tmp_path: Path) -> None:
    settings = FsdpSettings(device="cpu", compute_dtype="bfloat16")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head = choose_lm_head(shard(build_model(tiny_model(tmp_path), settings), mesh, settings), CPU)
    assert (head.shape, head.dtype) == (IDENTITY, torch.bfloat16)


@pytest.mark.parametrize("head", [LmHead(IDENTITY), LmHead(None)])
def test_values_come_from_the_hidden_state_that_predicts_the_target(head: LmHead) -> None:
    model: Any = value_head.attach_value_head(made(LlamaConfig(**TINY)))
    inputs = to_inputs(batch(), model, CPU)
    assert not values_of(model, inputs).any()  # as it starts
    with torch.no_grad():
        model.value_head.weight.normal_()
        model.value_head.bias.fill_(2.0)
    hidden = model.model(
        **{k: v for k, v in inputs.model.items() if k != "logits_to_keep"}
    ).last_hidden_state[0]
    expected = hidden[inputs.batch.target - 1] @ model.value_head.weight[0] + 2
    found = forward(model, inputs, head, values=True).value
    assert found is not None
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(values_of(model, inputs), expected)
    assert forward(model, inputs, head).value is None

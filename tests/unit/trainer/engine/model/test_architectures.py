"""Models of many kinds: packed rows give what each row alone gives, and their gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Lfm2Config

from support.trainer.forward_checks import ROWS, agree, alone, gradients
from support.trainer.tiny_model import tiny_sizes
from support.trainer.tiny_models import CONFIGS, REFUSED, VOCABULARY, logprobs, make, plain
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model.parallelize import prepare_model


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("attention", ["packed", "sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_give_what_each_gives_alone(name: str, attention: str) -> None:
    if reason := REFUSED.get((name, attention)):
        with pytest.raises(ValueError, match=reason):
            make(name, attention)
        return
    reference = plain(name)
    expected = torch.cat([alone(reference, row) for row in ROWS])
    weights = torch.linspace(-1, 1, len(expected))
    (expected.float() * weights).sum().backward()

    model = make(name, attention)
    logp = logprobs(model, micro_batch(ROWS, range(len(ROWS))))
    (logp * weights).sum().backward()
    assert (logp.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    agree(gradients(model), gradients(reference))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "mixtral"])
def test_checkpointed_blocks_have_the_same_gradients(name: str) -> None:
    seen = []
    for checkpointing in (False, True):
        model = make(name, gradient_checkpointing=checkpointing)
        logprobs(model, micro_batch(ROWS, range(len(ROWS)))).sum().backward()
        seen.append(gradients(model))
    agree(seen[1], seen[0], tolerance=0)


def test_a_checkpointed_block_keeps_its_input_only() -> None:
    kept = []
    for checkpointing in (False, True):
        model = make("qwen3", gradient_checkpointing=checkpointing)
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logprobs(model, micro_batch(ROWS, range(len(ROWS))))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


def test_nothing_is_dropped_whatever_the_config_says() -> None:
    config = CONFIGS["gpt2"]()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    model = prepare_model(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager"),
        FsdpSettings(device="cpu"),
    )
    ids = torch.arange(20)[None]
    for training in (False, True):
        model.train(training)
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_models_whose_layers_carry_a_state_are_refused() -> None:
    config = Lfm2Config(**tiny_sizes(VOCABULARY, layer_types=["conv", "full_attention"]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="has conv, which carry a state from one row"):
        prepare_model(model, FsdpSettings(device="cpu"))

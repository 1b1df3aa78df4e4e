"""Models of many kinds: packed rows give what each row alone gives, and their gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, RecurrentGemmaConfig, ZambaConfig

from support.trainer.forward_checks import ROWS, agree, alone, gradients
from support.trainer.tiny_model import tiny_sizes
from support.trainer.tiny_models import CONFIGS, REFUSED, VOCABULARY, logprobs, make, plain
from tracegrad_trainer.batches import micro_batch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model import compile as compile_blocks
from tracegrad_trainer.engine.model.hf_config import query_heads
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


MEMORY: list[dict[str, Any]] = [
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "selective"},
    {"activation_offloading": True},
    {"gradient_checkpointing": "selective", "activation_offloading": True},
]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "mixtral"])
def test_what_blocks_keep_changes_no_gradient(name: str) -> None:
    batch = micro_batch(ROWS, range(len(ROWS)))
    whole = make(name)
    logprobs(whole, batch).sum().backward()
    for settings in MEMORY:
        model = make(name, **settings)
        logprobs(model, batch).sum().backward()
        # A copy may lie in memory otherwise, and be added up in another order.
        agree(gradients(model), gradients(whole), tolerance=1e-6)


def _kept(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """Elements that a forward keeps for backward: what is saved, and what a policy stores."""
    sizes: list[int] = []
    store = torch.utils.checkpoint._VersionWrapper.__init__

    def wrapped(self: Any, value: Any) -> None:
        sizes.append(value.numel() if isinstance(value, Tensor) else 0)
        store(self, value)

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    model = make("qwen3", **settings)
    with (
        monkeypatch.context() as patch,
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
    ):
        patch.setattr(torch.utils.checkpoint._VersionWrapper, "__init__", wrapped)
        logprobs(model, micro_batch(ROWS, range(len(ROWS))))
    return sum(sizes)


def test_a_checkpointed_block_keeps_its_input_or_what_is_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = _kept(monkeypatch)
    selected = _kept(monkeypatch, gradient_checkpointing="selective")
    least = _kept(monkeypatch, gradient_checkpointing=True)
    assert least < every / 3
    assert 1.2 * least < selected < 0.8 * every
    # What is offloaded is in no one else's hands.
    assert _kept(monkeypatch, activation_offloading=True) < every / 3
    # But for what a policy stores: torch does so past the hooks that offload.
    stored = _kept(monkeypatch, gradient_checkpointing="selective", activation_offloading=True)
    assert stored > selected - least


def test_products_that_are_written_over_are_not_selected() -> None:
    with pytest.raises(ValueError, match=r"GptOssForCausalLM adds its experts' biases .* to true"):
        make("gpt_oss", gradient_checkpointing="selective")


def test_compiled_blocks_serve_rows_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, of which a minute would go by."""
    monkeypatch.setattr(compile_blocks, "_BACKEND", "aot_eager")
    torch._dynamo.reset()
    graphs: list[int] = []
    plain_, compiled = make("qwen3"), make("qwen3", compile=True)
    for rows in (ROWS, ROWS[:2], ROWS[1:]):
        batch = micro_batch(rows, range(len(rows)))
        for model in (plain_, compiled):
            model.zero_grad()
            logprobs(model, batch).square().sum().backward()
        agree(gradients(compiled), gradients(plain_), tolerance=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0
    with pytest.raises(ValueError, match=r"fsdp.compile = true: OlmoeForCausalLM is a mixture"):
        make("olmoe", compile=True)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"routing": "r2"}, "set fsdp.compile = false, or fsdp.routing = 'own'"),
        ({"gradient_checkpointing": "selective"}, "set gradient_checkpointing to true or false"),
        ({"attention": "eager"}, "set fsdp.attention = 'auto'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        FsdpSettings.model_validate({"compile": True, **settings})


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


def test_layers_that_carry_a_state_in_a_way_not_known_are_refused() -> None:
    config = RecurrentGemmaConfig(
        **tiny_sizes(VOCABULARY, block_types=["recurrent", "attention"], lru_width=32)
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="carry a state from one row of a pack to the next, in a"):
        prepare_model(model, FsdpSettings(device="cpu"))


def test_a_layer_of_a_block_within_a_block_goes_along_its_paths_once() -> None:
    """Zamba's hybrid blocks hold its Mamba blocks."""
    sizes = tiny_sizes(VOCABULARY, num_hidden_layers=4, num_key_value_heads=4)
    config = ZambaConfig(
        **sizes,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        attention_hidden_size=64,
        attention_head_dim=16,
        n_mamba_heads=2,
        use_mamba_kernels=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected = torch.cat([alone(model, row) for row in ROWS])
    model = prepare_model(model, FsdpSettings(device="cpu"))
    logp = logprobs(model, micro_batch(ROWS, range(len(ROWS))))
    assert (logp.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_models_that_keep_arguments_from_their_layers_are_refused() -> None:
    """Mamba 2's rows would run into each other behind its head."""
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=8,
        head_dim=8,
        state_size=8,
        expand=2,
    )
    model = prepare_model(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32), FsdpSettings(device="cpu")
    )
    with pytest.raises(ValueError, match="Mamba2ForCausalLM does not hand keyword arguments"):
        logprobs(model, micro_batch(ROWS, range(len(ROWS))))


def test_models_without_attention_are_refused_before_anything_starts() -> None:
    """By what a plan and an estimate of memory ask first."""
    with pytest.raises(ValueError, match="Mamba2Config has no attention heads"):
        query_heads(Mamba2Config())


def test_recomputed_layers_go_along_the_same_paths() -> None:
    batch = micro_batch(ROWS, range(len(ROWS)))
    whole, recomputed = make("qwen3_5"), make("qwen3_5", gradient_checkpointing=True)
    for model in (whole, recomputed):
        logprobs(model, batch).sum().backward()
    agree(gradients(recomputed), gradients(whole), tolerance=1e-6)

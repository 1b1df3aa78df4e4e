"""Rows in a pack do not see each other: packed log-probabilities equal those of rows alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learn_samples import VOCABULARY, rows, tiny_model
from torch import Tensor, nn

from tracegrad_trainer.batches import Row, micro_batch
from tracegrad_trainer.fsdp import FsdpSettings, build_model
from tracegrad_trainer.fsdp.attention import PackedRows, packed_attention
from tracegrad_trainer.fsdp.forward import forward, to_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("model"))


def alone(model: nn.Module, row: Row) -> Tensor:
    """Log-probabilities of a row's targets by the plainest means: one row, all logits."""
    ids = torch.from_numpy(row.input_ids).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    logits = logits[:-1] / torch.from_numpy(row.temperature[1:, None])
    chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(row.keep[1:])]


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_packed_equals_unpacked(folder: Path, attention: str) -> None:
    reference = build_model(folder, FsdpSettings(device="cpu", attention="sdpa"))
    model = build_model(folder, FsdpSettings(device="cpu", attention=attention))
    # A short row beside long ones: the packed attention makes blocks of unequal width.
    made = [*rows(7), *rows(3, seed=1, longest=13), *rows(2, seed=2, longest=120)]
    inputs = to_inputs(micro_batch(made, range(len(made))), model, CPU)
    now = forward(model, inputs)
    chosen, entropy = now.logp, now.entropy
    expected = torch.cat([alone(reference, row) for row in made])
    assert (chosen.double() - expected).abs().max() < 1e-6 * expected.abs().max()
    assert chosen.shape == entropy.shape
    assert (entropy >= 0).all()


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        settings = FsdpSettings(device="cpu", gradient_checkpointing=checkpointing)
        model = build_model(folder, settings)
        inputs = to_inputs(micro_batch(rows(4), range(4)), model, CPU)
        forward(model, inputs).logp.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain is not None
        torch.testing.assert_close(plain, checkpointed)


def test_entropy_is_that_of_the_tempered_distribution(folder: Path) -> None:
    model = build_model(folder, FsdpSettings(device="cpu"))
    (row,) = rows(1)
    inputs = to_inputs(micro_batch([row], [0]), model, CPU)
    ids = torch.from_numpy(row.input_ids).long()[None]
    plain = build_model(folder, FsdpSettings(device="cpu", attention="sdpa"))
    logits = plain(input_ids=ids).logits[0][inputs.batch.target - 1] / inputs.temperature[:, None]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert logits.shape[1] == VOCABULARY
    torch.testing.assert_close(forward(model, inputs).entropy, expected)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "keyword arguments"),
        ({"packed_rows": PackedRows([6]), "sliding_window": 4}, "window of 4 tokens"),
        ({"packed_rows": PackedRows([6]), "softcap": 30.0}, "caps attention scores"),
        ({"packed_rows": PackedRows([6]), "s_aux": torch.zeros(1)}, "attention sinks"),
    ],
)
def test_models_that_need_more_of_attention_are_refused(
    arguments: dict[str, object], reason: str
) -> None:
    x = torch.zeros(1, 2, 6, 4)
    with pytest.raises(ValueError, match=f"{reason}.*use attention = 'sdpa'"):
        packed_attention(nn.Identity(), x, x, x, None, **arguments)  # type: ignore[arg-type]


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no-such-folder"):
        build_model("./no-such-folder", FsdpSettings(device="cpu"))

"""The entropy as a term of the loss: its gradient out of the chunked head, and its coefficient."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from support.trainer import layout_ranks
from support.trainer.fsdp_ranks import VERSION
from support.trainer.layout_ranks import Layout, share
from support.trainer.learners import save_checkpoint
from support.trainer.logprob_head import Case, Peak, close
from support.trainer.loss_tokens import made, part, tokens
from tracegrad_trainer.engine import load_checkpoint
from tracegrad_trainer.engine.model.chunked_logprobs import (
    IDENTITY,
    LogitTransform,
    chunked_logprobs,
)
from tracegrad_trainer.engine.model.forward import LmHead, forward
from tracegrad_trainer.losses import Tokens, compute_loss, preset
from tracegrad_trainer.losses.compatibility import HIGHEST_ENTROPY_COEF, LOWEST_ENTROPY_COEF


@pytest.mark.parametrize("elements", [None, 1000, 37, 1])
@pytest.mark.parametrize(
    "shape",
    [IDENTITY, LogitTransform(scale=0.3), LogitTransform(cap=2.0), LogitTransform(2.0, 3.0)],
)
@pytest.mark.parametrize("heat", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 4e-6)])
def test_gradients_of_the_entropy_are_those_of_full_logits(
    elements: int | None, shape: LogitTransform, heat: bool, dtype: torch.dtype, bound: float
) -> None:
    """Of a mixture of both terms, and of the entropy alone."""
    case = Case(29, 37, dtype, bias=True, heat=heat)
    weights = torch.linspace(-1, 1, 29, dtype=dtype)
    for of_logp in (0.0, 1.0):

        def loss(found: tuple[Tensor, Tensor], of_logp: float = of_logp) -> Tensor:
            logp, entropy = found
            return (of_logp * logp * case.factor).sum() + (entropy * weights).sum()

        mine = torch.autograd.grad(
            loss(case.ours(elements, shape, entropy_gradient=True)), case.parameters
        )
        full = torch.autograd.grad(loss(case.full(shape)), case.parameters)
        for a, b in zip(mine, full, strict=True):
            close(a, b, bound)


def test_by_hand_of_two_words() -> None:
    """p = sigmoid(x / T): dH/dx = -(x / T) p (1 - p) / T."""
    x = torch.tensor([[math.log(3)], [-1.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    heat = torch.tensor([1.0, 0.5], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    _, entropy = chunked_logprobs(x, weight, None, labels, heat, entropy_gradient=True)
    (slope,) = torch.autograd.grad(entropy.sum(), x)
    y = x.detach()[:, 0] / heat
    p = torch.sigmoid(y)
    assert slope[:, 0].tolist() == pytest.approx((-y * p * (1 - p) / heat).tolist())
    assert slope[0, 0].item() == pytest.approx(-math.log(3) * 3 / 16)


def test_certain_words_have_a_gradient_that_is_a_number() -> None:
    case = Case(9, 21, torch.float32)
    with torch.no_grad():
        case.hidden.mul_(1000)
    logp, entropy = case.ours(50, entropy_gradient=True)
    slopes = torch.autograd.grad(logp.sum() + entropy.sum(), case.parameters)
    assert all(torch.isfinite(slope).all() for slope in slopes)


def test_logits_are_never_held_whole() -> None:
    """Whatever the vocabulary x tokens: two chunks, and what is one a token or a word."""
    n, vocabulary, elements = 640, 4000, 40_000
    case = Case(n, vocabulary, torch.float32)
    with Peak() as seen:
        logp, entropy = case.ours(elements, entropy_gradient=True)
        torch.autograd.backward([logp, entropy], [case.factor, case.factor])
    gradients = sum(p.numel() * p.element_size() for p in case.parameters)
    assert seen.most - gradients < n * vocabulary * 4 / 4
    with Peak() as without:
        found, _ = case.ours(elements)
        found.backward(case.factor)
    assert seen.most < without.most + 2 * elements * 4


def given(seed: int = 0) -> Tokens:
    whole = made(seed)
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(len(whole), generator=generator, dtype=torch.float64)
    return replace(whole, entropy=entropy.requires_grad_())


def test_the_bonus_by_hand() -> None:
    """-coef x (1 / 3) of each turn's mean entropy; an expert's turn has none, and counts."""
    some = tokens(
        [-1.0] * 4,
        turn=[0, 0, 1, 2],
        demonstration=[False, False, False, True],
        advantage=[0.0] * 4,
        entropy=torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True),
    )
    settings = preset("grpo", entropy_coef=0.1, aggregation="turn_mean")
    done = compute_loss(settings, some)
    assert done.entropy.item() == pytest.approx(-0.1 * (1.5 + 4))
    assert done.total.item() == pytest.approx(done.policy.item() + done.entropy.item())
    assert some.entropy is not None
    (slope,) = torch.autograd.grad(done.total, some.entropy, retain_graph=True)
    assert slope.tolist() == pytest.approx([-0.05, -0.05, -0.1, 0.0])
    assert compute_loss(settings, some, entropy_coef=0.2).entropy.item() == pytest.approx(-1.1)


def test_no_split_moves_it() -> None:
    whole = given(3)
    settings = preset("grpo", entropy_coef=0.1, aggregation="rollout_mean")
    parts = [
        compute_loss(settings, part(whole, rows)) for rows in ([0, 5], [1, 2, 3, 4], range(6, 12))
    ]
    expected = compute_loss(settings, whole)
    assert sum(one.entropy.item() for one in parts) == pytest.approx(expected.entropy.item())
    assert sum(one.total.item() for one in parts) == pytest.approx(expected.total.item())


def test_without_a_coefficient_it_costs_nothing() -> None:
    whole = given(1)
    done = compute_loss(preset("grpo"), whole)
    assert done.entropy.item() == 0
    done.total.backward()
    assert whole.entropy is not None
    assert whole.entropy.grad is None
    assert not preset("grpo").has_entropy


def test_the_coefficient_adapts_by_hand() -> None:
    settings = preset("grpo", entropy_coef=0.01, entropy_target=0.5, entropy_rate=2.0)
    assert settings.next_entropy_coef(0.01, 0.5) == 0.01
    assert settings.next_entropy_coef(0.01, 0.25) == pytest.approx(0.01 * math.exp(0.5))
    assert settings.next_entropy_coef(0.01, 1.0) == pytest.approx(0.01 * math.exp(-1.0))
    assert settings.next_entropy_coef(0.9, 0.0) == HIGHEST_ENTROPY_COEF
    assert settings.next_entropy_coef(2e-6, 10.0) == LOWEST_ENTROPY_COEF
    assert preset("grpo", entropy_coef=0.01).next_entropy_coef(0.01, 0.0) == 0.01


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grpo", {"entropy_target": 0.5}, "set entropy_coef"),
        ("grpo", {"entropy_target": 0.5, "entropy_coef": 2.0}, "with entropy_target from"),
        ("sft", {"entropy_coef": 0.1}, "surrogate 'sft' samples nothing"),
        ("dpo", {"entropy_coef": 0.1}, "surrogate 'dpo' samples nothing"),
        ("grpo", {"entropy_coef": -0.1}, "entropy_coef"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        preset(name, **settings)


def step(learner: Any) -> Any:
    return learner.train(share("turn_mean", Layout()), version=VERSION)


def test_a_step_raises_an_entropy_that_is_too_low(folder: Path, one_rank: None) -> None:
    """With nothing else to learn; the metric is what it was before each step."""
    low = preset("grpo", entropy_coef=0.5, entropy_target=4.5, surrogate="reinforce")
    learner = layout_ranks.learner(folder, "turn_mean", lr=3e-3)
    learner.objective = low
    learner.entropy_coef = low.entropy_coef
    batches = [replace(b, advantage=0 * b.advantage) for b in share("turn_mean", Layout())]
    results = [learner.train(batches, version=VERSION) for _ in range(4)]
    entropies = [one.metrics["entropy"] for one in results]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.05
    assert all(one.metrics["entropy_loss"] < 0 for one in results)
    coefs = [one.metrics["entropy_coef"] for one in results]
    for k in range(3):  # below the target: it rises, by what each step saw
        assert coefs[k + 1] == pytest.approx(coefs[k] * math.exp(0.1 * (4.5 - entropies[k])))


def test_full_logits_have_the_same_gradient(folder: Path, one_rank: None) -> None:
    found = []
    for whole in (False, True):
        learner = layout_ranks.learner(folder, "turn_mean")
        head = LmHead(None, "as the model makes them") if whole else learner.engine.head
        [first, *_] = learner.engine.inputs(share("turn_mean", Layout()))
        now = forward(learner.model, first, head, entropy_gradient=True)
        (now.entropy.sum() + now.policy_logprobs.sum()).backward()
        found.append([p.grad.full_tensor().clone() for p in learner.model.parameters()])  # type: ignore[union-attr]
        assert not forward(learner.model, first, head).entropy.requires_grad
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-5)


def test_a_resumed_run_goes_on_with_its_coefficient(
    folder: Path, tmp_path: Path, one_rank: None
) -> None:
    one = layout_ranks.learner(folder, "turn_mean", lr=1e-3)
    assert one.objective.entropy_target is not None
    began = one.entropy_coef
    step(one)
    assert one.entropy_coef != began
    save_checkpoint(one, tmp_path, 1, {}, keep=1)
    other = layout_ranks.learner(folder, "turn_mean", lr=1e-3)
    load_checkpoint(other, tmp_path / "step-00000001")
    assert other.entropy_coef == one.entropy_coef
    for _ in range(2):
        assert step(one) == step(other)
    assert other.entropy_coef == one.entropy_coef


def test_a_step_that_was_not_applied_does_not_move_it(folder: Path, one_rank: None) -> None:
    learner = layout_ranks.learner(folder, "turn_mean")
    began = learner.entropy_coef
    batches = [
        replace(b, advantage=0 * b.advantage + float("inf")) for b in share("turn_mean", Layout())
    ]
    assert not learner.train(batches, version=VERSION).applied
    assert learner.entropy_coef == began

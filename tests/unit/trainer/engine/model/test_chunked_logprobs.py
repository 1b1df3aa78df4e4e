"""The chunked log-probability head against full logits: numbers, gradients and memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.trainer.logprob_head import HIDDEN, Case, Peak, close
from tracegrad_trainer.engine.model.chunked_logprobs import (
    IDENTITY,
    MAX_LOGIT_ELEMENTS,
    LogitTransform,
    chunked_logprobs,
)


@pytest.mark.parametrize("elements", [None, 1000, 37, 1])
@pytest.mark.parametrize(
    "shape",
    [IDENTITY, LogitTransform(scale=0.3), LogitTransform(cap=2.0), LogitTransform(2.0, 3.0)],
)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=["f64", "f32"]
)
def test_numbers_and_gradients_are_those_of_full_logits(
    elements: int | None, shape: LogitTransform, dtype: torch.dtype, bound: float
) -> None:
    case = Case(29, 37, dtype, bias=True)
    logp, entropy = case.ours(elements, shape)
    expected, expected_entropy = case.full(shape)
    assert logp.dtype == entropy.dtype == dtype
    close(logp, expected, bound)
    close(entropy, expected_entropy, bound * 3)
    assert not entropy.requires_grad
    for mine, full in zip(case.gradients(logp), case.gradients(expected), strict=True):
        close(mine, full, bound * 3)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 20),
    vocabulary=st.integers(1, 50),
    elements=st.integers(1, 2000),
    heat=st.booleans(),
)
def test_chunks_of_any_size_change_nothing(
    n: int, vocabulary: int, elements: int, heat: bool
) -> None:
    case = Case(n, vocabulary, torch.float64, heat=heat)
    logp, entropy = case.ours(elements)
    expected, expected_entropy = case.full()
    torch.testing.assert_close(logp, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for mine, full in zip(case.gradients(logp), case.gradients(expected), strict=True):
        torch.testing.assert_close(mine, full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("shape", [IDENTITY, LogitTransform(0.5, 2.0)])
@pytest.mark.parametrize("elements", [None, 20])
def test_finite_differences_agree(
    shape: LogitTransform, elements: int | None, entropy_gradient: bool
) -> None:
    case = Case(5, 7, torch.float64, bias=True)
    case.check_finite_differences(elements, shape, entropy_gradient=entropy_gradient)


def test_numbers_by_hand() -> None:
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [2.0]]).log1p()
    logp, entropy = chunked_logprobs(
        hidden, weight, None, torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
    )
    # logits 0 and log 3: probabilities 1/4, 3/4; at temperature 1/2 1/10, 9/10
    torch.testing.assert_close(logp.exp(), torch.tensor([0.25, 0.9]))
    quarter = 0.25 * torch.tensor(4.0).log() + 0.75 * torch.tensor(4 / 3).log()
    torch.testing.assert_close(entropy[0], quarter)


def test_another_backward_gives_the_same_gradient_again() -> None:
    case = Case(9, 21, torch.float64)
    logp, _ = case.ours()
    first = torch.autograd.grad(logp.sum(), case.parameters, retain_graph=True)
    second = torch.autograd.grad(logp.sum(), case.parameters)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_empty_micro_batch_gives_zero_gradients() -> None:
    case = Case(0, 21, torch.float32, bias=True)
    logp, entropy = case.ours()
    assert logp.shape == entropy.shape == (0,)
    for gradient, parameter in zip(case.gradients(logp), case.parameters, strict=True):
        assert gradient.shape == parameter.shape
        assert not gradient.any()


def test_what_is_frozen_gets_no_gradient() -> None:
    case = Case(9, 21, torch.float32)
    case.weight.requires_grad_(False)
    case.ours(elements=50)[0].sum().backward()
    assert case.weight.grad is None
    assert case.hidden.grad is not None


def test_logits_far_beyond_exp_are_exact() -> None:
    case = Case(9, 21, torch.float32)
    with torch.no_grad():
        case.hidden.mul_(1000)
    logp, entropy = case.ours(elements=50)
    close(logp, case.full()[0], 1e-6)
    assert torch.isfinite(entropy).all()
    assert all(torch.isfinite(g).all() for g in case.gradients(logp))


def test_bfloat16_sums_are_in_float32() -> None:
    case = Case(64, 3000, torch.bfloat16)
    logp, entropy = case.ours(elements=20_000)
    assert logp.dtype == entropy.dtype == torch.float32
    expected, expected_entropy = case.full()
    coarse, coarse_entropy = case.full(dtype=torch.bfloat16)

    def error(a: Tensor, b: Tensor) -> float:
        return float((a.detach().double() - b.detach().double()).square().mean().sqrt())

    # Only the products are rounded, not the sums over the vocabulary.
    assert error(logp, expected) < min(0.02, error(coarse, expected) / 2)
    assert error(entropy, expected_entropy) < min(0.02, error(coarse_entropy, expected_entropy) / 2)
    for mine, full in zip(case.gradients(logp), case.gradients(expected), strict=True):
        assert mine.dtype == torch.bfloat16
        close(mine, full, 0.01)


def peak(n: int, vocabulary: int, elements: int) -> int:
    """Bytes of forward and backward over what the inputs and their gradients take."""
    case = Case(n, vocabulary, torch.float32)
    with Peak() as seen:
        logp, _ = case.ours(elements)
        logp.backward(case.factor)
    gradients = sum(p.numel() * p.element_size() for p in case.parameters)
    assert seen.most > 0
    return seen.most - gradients


def test_memory_does_not_grow_with_vocabulary_times_tokens() -> None:
    elements = 40_000
    small, large = peak(40, 1000, elements), peak(640, 16_000, elements)
    whole = 640 * 16_000 * 4
    assert small < 4 * elements * 4  # a few chunks
    # 256 times as many logits: only what is there once a token, or once a word, may grow.
    assert large < small + 64 * 640 + 8 * 16_000 + HIDDEN * 16_000 * 4
    assert large < whole / 20
    assert max(MAX_LOGIT_ELEMENTS.values()) * 4 <= 1 << 30

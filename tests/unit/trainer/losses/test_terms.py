"""Aggregation, the KL to a reference and the value loss: by hand and by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.trainer.loss_tokens import made, part, slopes, tokens
from tracegrad_trainer.losses import Tokens, compute_loss, preset
from tracegrad_trainer.losses.kl import kl_to_reference
from tracegrad_trainer.losses.loss import value_loss


def fan_out() -> Tokens:
    """Rollout 0 has rows of 3 and 1 targets, of three turns in all; rollout 1 one of 2.

    The loss of token t is t, by `sft`.
    """
    return tokens(
        [0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
        turn=[0, 0, 1, 2, 3, 3],
        row=[0, 0, 0, 1, 2, 2],
        rollout=[0, 0, 0, 0, 1, 1],
    )


@pytest.mark.parametrize(
    ("name", "total", "units"),
    [
        ("token_mean", 15, 6),
        ("turn_mean", (0 + 1) / 2 + 2 + 3 + (4 + 5) / 2, 4),
        ("rollout_mean", (0 + 1 + 2 + 3) / 4 + (4 + 5) / 2, 2),
        ("sum_constant", 15, 2 * 10),
        ("group_mean", 15 / 6, 1),
    ],
)
def test_aggregation_by_hand(name: str, total: float, units: float) -> None:
    changes = {"constant": 10.0} if name == "sum_constant" else {}
    done = compute_loss(preset("sft", aggregation=name, **changes), fan_out())
    assert done.total.item() == pytest.approx(total)
    assert done.units.item() == pytest.approx(units)


def test_the_mean_over_groups_by_hand() -> None:
    """Groups of 3 and 1 tokens, whatever their rollouts: 1/2 (0+1+2)/3 + 1/2 x 3."""
    given = tokens([0.0, -1.0, -2.0, -3.0], rollout=[0, 1, 1, 2], group=[0, 0, 0, 1])
    done = compute_loss(preset("sft", aggregation="group_mean"), given)
    assert (done.total / done.units).item() == pytest.approx((1 + 3) / 2)
    assert compute_loss(preset("sft"), given).total.item() / 4 == pytest.approx(6 / 4)


@pytest.mark.parametrize(
    "name", ["token_mean", "turn_mean", "rollout_mean", "group_mean", "sum_constant"]
)
def test_a_rollouts_weight_does_not_hang_on_where_its_rows_are(name: str) -> None:
    settings = preset("sft", aggregation=name)
    whole = compute_loss(settings, fan_out())
    parts = [compute_loss(settings, part(fan_out(), rows)) for rows in ([1], [0, 2])]
    assert sum(p.total.item() for p in parts) == pytest.approx(whole.total.item())
    assert sum(p.units.item() for p in parts) == pytest.approx(whole.units.item())


def test_a_masked_token_leaves_the_numerator_and_stays_in_the_denominator() -> None:
    """Losses 1, 1, 1 and a rejected 100: their mean is 3/4, and not 103/4."""
    given = tokens([-1.0, -1.0, -1.0, -100.0], mu=[-1.0, -1.0, -1.0, -105.0], turn=[0, 1, 2, 3])
    settings = preset("grpo", surrogate="reinforce", correction="reject", correction_level="token")
    done = compute_loss(settings, given)
    assert (done.total / done.units).item() == pytest.approx(0.75)
    assert done.masked.tolist() == [False, False, False, True]


D = [math.log(2), -math.log(2), 0.0]  # log pi - log reference


@pytest.mark.parametrize(
    ("name", "values", "steepness"),
    [
        ("k1", D, [1, 1, 1]),
        ("k2", [d * d / 2 for d in D], D),
        ("k3", [0.5 - 1 + D[0], 2 - 1 + D[1], 0], [0.5, -1, 0]),
    ],
)
def test_kl_by_hand(name: str, values: list[float], steepness: list[float]) -> None:
    given = tokens([d - 1 for d in D], reference=[-1.0] * 3, advantage=[0.0] * 3)
    done = compute_loss(preset("grpo", kl=name, kl_coef=0.5), given)
    assert done.kl.item() == pytest.approx(0.5 * sum(values))
    assert done.total.item() == pytest.approx(0.5 * sum(values))
    assert slopes(done.total, given) == pytest.approx([0.5 * s for s in steepness])


def test_the_unbiased_form_is_times_pi_over_mu() -> None:
    """(pi/mu) k3 of pi/ref = 2, pi/mu = 3; its slope by log pi is (pi/mu) d."""
    given = tokens(
        [-1.0],
        old=[-1.5],
        mu=[-1 - math.log(3)],
        reference=[-1 - math.log(2)],
        advantage=[0.0],
    )
    settings = preset("grpo", kl="k3", kl_coef=1.0, kl_unbiased=True)
    done = compute_loss(settings, given)
    assert done.kl.item() == pytest.approx(3 * (0.5 - 1 + math.log(2)))
    assert slopes(done.total, given) == pytest.approx([3 * math.log(2)])


Form = tuple[str, bool]
FORMS: list[Form] = [(name, unbiased) for name in ("k1", "k2", "k3") for unbiased in (False, True)]


def kl_gradients(
    logits: Tensor, mu: Tensor, reference: Tensor, *, recorded: Tensor | None = None
) -> tuple[Tensor, dict[Form, Tensor]]:
    """By the logits of a policy over a few tokens, all of which are enumerated: of the KL itself,
    and what each estimator says in expectation over tokens that mu sampled (and `recorded`, if it
    is given, is said to have). `old` is the policy's own, as at a batch's first step."""
    recorded_logprobs = mu if recorded is None else recorded
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    found = {}
    for name, unbiased in FORMS:
        logs = logits.log_softmax(0)
        given = replace(
            tokens(logs.tolist(), mu=recorded_logprobs.tolist(), reference=reference.tolist()),
            policy_logprobs=logs,
        )
        each = kl_to_reference(given, name, unbiased=unbiased)  # type: ignore[arg-type]
        (found[name, unbiased],) = torch.autograd.grad((mu.exp() * each).sum(), logits)
    return exact, found


def test_only_the_unbiased_forms_and_k2_have_the_gradient_of_the_kl() -> None:
    """Exact expectations over a policy of four tokens, sampled by itself or by an older one."""
    logits = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64)
    older = torch.tensor([0.9, 0.2, -0.4, 0.1], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    exact, by_itself = kl_gradients(logits, logits.log_softmax(0), reference)
    torch.testing.assert_close(by_itself["k2", False], exact)
    torch.testing.assert_close(by_itself["k1", False], torch.zeros(4, dtype=torch.float64))
    assert (by_itself["k3", False] - exact).abs().max() > 0.01
    _, by_older = kl_gradients(logits, older, reference)
    for name, unbiased in FORMS:
        if unbiased:
            torch.testing.assert_close(by_itself[name, True], exact)
            torch.testing.assert_close(by_older[name, True], exact)
        else:
            assert (by_older[name, False] - exact).abs().max() > 0.01


def test_the_unbiased_kl_is_right_on_an_older_policys_tokens() -> None:
    """Logits of twelve tokens, the sampler's off by noise of deviation 1. Weighed by pi/old, as it
    was before, the gradients are off by 183 %, 97 % and 97 %: as far as without a weight."""
    generator = torch.Generator().manual_seed(0)
    right, by_old = (dict.fromkeys(("k1", "k2", "k3"), 0.0) for _ in range(2))
    for _ in range(20):
        logits, noise, other = torch.randn((3, 12), generator=generator).double()
        mu, reference = ((logits + x).log_softmax(0) for x in (noise, other))
        for errors, recorded in ((right, mu), (by_old, logits.log_softmax(0))):
            exact, found = kl_gradients(logits, mu, reference, recorded=recorded)
            for name in errors:
                off = found[name, True] - exact
                errors[name] += float(off.norm() / exact.norm()) / 20
    assert right == pytest.approx(dict.fromkeys(right, 0.0), abs=1e-12)
    assert by_old == pytest.approx({"k1": 1.829, "k2": 0.973, "k3": 0.973}, abs=1e-3)


def test_kl_is_aggregated_like_the_loss_and_can_only_be_watched() -> None:
    d = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    given = replace(
        fan_out(), reference_logprobs=fan_out().policy_logprobs.detach() - torch.tensor(d).double()
    )
    settings = preset("grpo", kl="k1", kl_coef=2.0, aggregation="rollout_mean")
    assert compute_loss(settings, given).kl.item() == pytest.approx(2 * (1.0 / 4 + 1.1 / 2))
    watched = compute_loss(preset("grpo", kl="k1"), given)
    assert watched.total.item() == watched.policy.item()


def test_value_loss_by_hand() -> None:
    """v = 1, old 0, clip 0.2: of R = 2 near and far are (0.2 - 2)^2 and (1 - 2)^2, and so on."""
    given = tokens(
        [-1.0] * 4,
        value=torch.tensor([1.0, 1.0, 0.1, 1.0], dtype=torch.float64, requires_grad=True),
        old_value=[0.0] * 4,
        returns=[2.0, -1.0, 0.5, 2.0],
        demonstration=[False, False, False, True],
    )
    assert given.value is not None
    clipped = value_loss(given, 0.2)
    assert clipped.tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 2**2, 0.5 * 0.4**2, 0])
    (slope,) = torch.autograd.grad(clipped.sum(), given.value)
    # Where the clipped one is worse it holds the value still.
    assert slope.tolist() == pytest.approx([0, 2, -0.4, 0])
    assert value_loss(given, None).tolist() == pytest.approx([0.5, 2, 0.08, 0])


def test_the_value_loss_is_part_of_the_total_with_its_share() -> None:
    given = made(1, experts=False)
    settings = preset("ppo", value_coef=0.3, aggregation="turn_mean")
    done = compute_loss(settings, given)
    expected = (0.3 * value_loss(given, 0.2) / given.turn_tokens).sum()
    assert done.value.item() == pytest.approx(expected.item())
    assert done.total.item() == pytest.approx((done.policy + done.value).item())
    done.total.backward()
    assert given.value is not None
    assert given.value.grad is not None
    assert given.value.grad.abs().sum() > 0


def test_gradients_of_the_terms_are_those_of_finite_differences() -> None:
    given = made(6, rows=5)
    assert given.value is not None

    def of(value: Tensor) -> Tensor:
        return value_loss(replace(given, value=value), 0.2)

    assert torch.autograd.gradcheck(of, (given.value,))
    forms = [("k1", False), ("k2", False), ("k3", False), ("k1", True), ("k3", True)]
    for name, unbiased in forms:  # the ratio of the unbiased k2 is no part of its gradient

        def kl(logp: Tensor, name: str = name, unbiased: bool = unbiased) -> Tensor:
            moved = replace(given, policy_logprobs=logp)
            return kl_to_reference(moved, name, unbiased=unbiased)  # type: ignore[arg-type]

        assert torch.autograd.gradcheck(kl, (given.policy_logprobs,))

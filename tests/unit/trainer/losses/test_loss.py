"""Closed forms worked by hand, and one independent NumPy reference for the whole preset."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.trainer.loss_tokens import tokens
from tracegrad_trainer.losses import (
    Tokens,
    compute_loss,
    preset,
)


def test_ppo_clip_by_hand() -> None:
    ratios = [1.1, 1.5, 0.5, 1.5, 0.5]
    signs = [2.0, 2.0, 2.0, -2.0, -2.0]
    given = tokens([math.log(r) for r in ratios], old=[0.0] * 5, advantage=signs)
    done = compute_loss(preset("grpo", correction="none"), given)
    # -min(rA, clip(r)A): 2.2, 2.4 (clipped), 1.0, -3.0, -1.6 (clipped)
    assert done.total.item() == pytest.approx(-(2.2 + 2.4 + 1.0 - 3.0 - 1.6))
    assert done.clipped.tolist() == [False, True, False, False, True]
    assert done.units.item() == 5
    done.total.backward()
    assert given.policy_logprobs.grad is not None
    assert given.policy_logprobs.grad.tolist() == pytest.approx([-2.2, 0, -1.0, 3.0, 0])


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    given = tokens([math.log(5.0)], old=[0.0], advantage=[-1.0])
    done = compute_loss(preset("grpo", correction="none", dual_clip=3.0), given)
    assert done.total.item() == pytest.approx(3.0)
    assert done.clipped.tolist() == [True]


def test_the_log_ratio_is_clamped_before_exp() -> None:
    given = tokens([0.0], old=[-100.0], advantage=[-1.0])
    done = compute_loss(preset("grpo", correction="none"), given)
    assert done.total.item() == pytest.approx(math.exp(20))


def test_turn_ratio_is_the_geometric_mean() -> None:
    given = tokens([math.log(1.2), math.log(0.9), math.log(1.1)], old=[0.0] * 3, turn=[0, 0, 1])
    done = compute_loss(preset("grpo", correction="none", ratio="turn"), given)
    shared = math.sqrt(1.2 * 0.9)
    assert done.log_ratio.exp().tolist() == pytest.approx([shared, shared, 1.1])
    assert done.total.item() == pytest.approx(-(2 * shared + 1.1))


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [2.0, 0.5, 2.0]), ("turn", [math.sqrt(4 * 0.5), math.sqrt(4 * 0.5), 2.0])],
)
def test_tis_caps_old_over_mu(level: str, weights: list[float]) -> None:
    w = [4.0, 0.5, 3.0]
    given = tokens([0.0] * 3, mu=[-math.log(x) for x in w], turn=[0, 0, 1])
    done = compute_loss(preset("grpo", correction_level=level), given)
    assert done.total.item() == pytest.approx(-sum(weights))
    done.total.backward()
    assert given.policy_logprobs.grad is not None
    assert given.policy_logprobs.grad.tolist() == pytest.approx([-x for x in weights])
    assert done.corrected.tolist() == [level == "token", False, True]


def test_turn_mean_weighs_turns_equally() -> None:
    given = tokens([0.0] * 4, advantage=[1.0, 2.0, 3.0, 4.0], turn=[0, 0, 0, 1])
    done = compute_loss(preset("grpo", aggregation="turn_mean"), given)
    assert done.total.item() == pytest.approx(-(2.0 + 4.0))
    assert done.units.item() == 2


def numpy_grpo(t: Tokens, cap: float) -> tuple[float, np.ndarray]:  # type: ignore[type-arg]
    """The preset again, in NumPy and with its gradient by hand: the reference."""
    logp, old, mu, adv = (
        x.detach().numpy()
        for x in (t.policy_logprobs, t.old_logprobs, t.rollout_logprobs, t.advantage)
    )
    turn = t.turn.numpy()
    ratio = np.exp(np.clip(logp - old, -20, 20))
    weight = np.empty_like(ratio)
    for k in range(t.turns):
        weight[turn == k] = min(np.exp(np.mean((old - mu)[turn == k])), cap)
    inside = np.where(adv > 0, ratio <= 1.2, ratio >= 0.8)
    loss = -weight * np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv)
    return float(loss.sum()), np.where(inside, -weight * ratio * adv, 0.0)


def test_the_preset_equals_its_numpy_reference() -> None:
    rng = np.random.default_rng(0)
    n = 400
    logp = rng.normal(-2, 1, n)
    given = tokens(
        logp.tolist(),
        old=(logp + rng.normal(0, 0.3, n)).tolist(),
        mu=(logp + rng.normal(0, 2.0, n)).tolist(),
        advantage=rng.normal(0, 1, n).tolist(),
        turn=np.sort(rng.integers(0, 60, n)).tolist(),
    )
    done = compute_loss(preset("grpo"), given)
    done.total.backward()
    total, gradient = numpy_grpo(given, 2.0)
    assert given.policy_logprobs.grad is not None
    assert done.total.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(given.policy_logprobs.grad.numpy(), gradient, rtol=1e-6)
    assert 0 < done.corrected.sum() < n
    assert 0 < done.clipped.sum() < n

"""Closed forms worked by hand, and one independent NumPy reference for the whole preset."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.trainer.loss_tokens import slopes, tokens
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
    assert slopes(done.total, given) == pytest.approx([-2.2, 0, -1.0, 3.0, 0])


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    given = tokens([math.log(5.0)], old=[0.0], advantage=[-1.0])
    done = compute_loss(preset("grpo", correction="none", dual_clip=3.0), given)
    assert done.total.item() == pytest.approx(3.0)
    assert done.clipped.tolist() == [True]


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
    total, gradient = numpy_grpo(given, 2.0)
    assert done.total.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(slopes(done.total, given), gradient, rtol=1e-6)
    assert 0 < done.corrected.sum() < n
    assert 0 < done.clipped.sum() < n

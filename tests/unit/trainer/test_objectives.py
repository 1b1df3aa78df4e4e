"""Closed forms worked by hand, and one independent NumPy reference for the whole preset."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from objective_tokens import tokens
from pydantic import ValidationError
from torch import Tensor

from tracegrad_trainer.objectives import (
    ObjectiveSettings,
    Scored,
    Tokens,
    advantages,
    evaluate,
    maxima,
    preset,
    summarise,
    sums,
)


def of_rewards(name: str, rewards: list[float], group: list[int]) -> list[float]:
    rollouts = [
        Scored(
            rollout_id=str(i),
            task=str(number),
            agent="",
            group=number,
            reward=reward,
            turn_rewards=np.zeros(1),
            tokens=np.ones(1, np.int64),
            parents=np.full(1, -1),
            states=[b""],
        )
        for i, (reward, number) in enumerate(zip(rewards, group, strict=True))
    ]
    found = advantages(preset("grpo", advantage=name), rollouts, {})
    return [float(values[0]) for values in found]


def test_group_advantages() -> None:
    rewards, group = [1.0, 0.0, 0.0, 3.0, 5.0, 2.0], [0, 0, 0, 1, 1, 2]
    centred = of_rewards("dr_grpo", rewards, group)
    assert centred == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1, 1, 0])
    scaled = of_rewards("grpo", rewards, group)
    # std of (1, 0, 0) is sqrt(1/3), of (3, 5) sqrt(2); one alone has none.
    assert scaled == pytest.approx(
        [2 / 3 * 3**0.5, -(3**0.5) / 3, -(3**0.5) / 3, -(2**-0.5), 2**-0.5, 0], rel=1e-5
    )
    assert of_rewards("grpo", [], []) == []


def test_ppo_clip_by_hand() -> None:
    ratios = [1.1, 1.5, 0.5, 1.5, 0.5]
    signs = [2.0, 2.0, 2.0, -2.0, -2.0]
    given = tokens([math.log(r) for r in ratios], old=[0.0] * 5, advantage=signs)
    done = evaluate(preset("grpo", correction="none"), given)
    # -min(rA, clip(r)A): 2.2, 2.4 (clipped), 1.0, -3.0, -1.6 (clipped)
    assert done.total.item() == pytest.approx(-(2.2 + 2.4 + 1.0 - 3.0 - 1.6))
    assert done.clipped.tolist() == [False, True, False, False, True]
    assert done.units.item() == 5
    done.total.backward()
    assert given.logp.grad is not None
    assert given.logp.grad.tolist() == pytest.approx([-2.2, 0, -1.0, 3.0, 0])


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    given = tokens([math.log(5.0)], old=[0.0], advantage=[-1.0])
    done = evaluate(preset("grpo", correction="none", dual_clip=3.0), given)
    assert done.total.item() == pytest.approx(3.0)
    assert done.clipped.tolist() == [True]


def test_the_log_ratio_is_clamped_before_exp() -> None:
    given = tokens([0.0], old=[-100.0], advantage=[-1.0])
    done = evaluate(preset("grpo", correction="none"), given)
    assert done.total.item() == pytest.approx(math.exp(20))


def test_turn_ratio_is_the_geometric_mean() -> None:
    given = tokens([math.log(1.2), math.log(0.9), math.log(1.1)], old=[0.0] * 3, turn=[0, 0, 1])
    done = evaluate(preset("grpo", correction="none", ratio="turn"), given)
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
    done = evaluate(preset("grpo", correction_level=level), given)
    assert done.total.item() == pytest.approx(-sum(weights))
    done.total.backward()
    assert given.logp.grad is not None
    assert given.logp.grad.tolist() == pytest.approx([-x for x in weights])
    assert done.corrected.tolist() == [level == "token", False, True]


def test_turn_mean_weighs_turns_equally() -> None:
    given = tokens([0.0] * 4, advantage=[1.0, 2.0, 3.0, 4.0], turn=[0, 0, 0, 1])
    done = evaluate(preset("grpo", aggregation="turn_mean"), given)
    assert done.total.item() == pytest.approx(-(2.0 + 4.0))
    assert done.units.item() == 2


def numpy_grpo(t: Tokens, cap: float) -> tuple[float, np.ndarray]:  # type: ignore[type-arg]
    """The preset again, in NumPy and with its gradient by hand: the reference."""
    logp, old, mu, adv = (x.detach().numpy() for x in (t.logp, t.old, t.mu, t.advantage))
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
    done = evaluate(preset("grpo"), given)
    done.total.backward()
    total, gradient = numpy_grpo(given, 2.0)
    assert given.logp.grad is not None
    assert done.total.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(given.logp.grad.numpy(), gradient, rtol=1e-6)
    assert 0 < done.corrected.sum() < n
    assert 0 < done.clipped.sum() < n


def numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def test_diagnostics_by_hand() -> None:
    given = tokens(
        [-1.0, -1.0, -1.0],
        mu=[-1.0, -1.5, -0.8],
        turn=[0, 0, 1],
        version=[4, 4, 2],
    )
    done = evaluate(preset("grpo", correction_level="token", correction_cap=1.2), given)
    added = numbers(sums(given, done, torch.tensor([1.0, 2.0, 3.0]), 4))
    metrics = summarise(added, numbers(maxima(given, done, 4)))
    d = np.array([0.0, 0.5, -0.2])  # log old/mu
    w = np.exp(d)
    assert metrics["k1"] == pytest.approx(-d.mean())
    assert metrics["k3"] == pytest.approx((w - 1 - d).mean())
    assert metrics["ess"] == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))
    assert metrics["max_w"] == pytest.approx(math.exp(0.5))
    assert metrics["turn_max_w"] == pytest.approx(math.exp(0.25))
    assert metrics["gap_mean"] == pytest.approx(0.25)  # the two on-policy tokens
    assert metrics["gap_max"] == pytest.approx(0.5)
    assert metrics["gap_tokens"] == 2
    assert metrics["difference_gap_2"] == pytest.approx(0.2)
    assert "difference_gap_1" not in metrics
    assert metrics["corrected_share"] == pytest.approx(1 / 3)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(2 / 3), 2)
    assert (metrics["tokens_trained"], metrics["turns_trained"]) == (3, 2)


def test_diagnostics_of_nothing_are_zero() -> None:
    given = tokens([])
    done = evaluate(preset("grpo"), given)
    added = numbers(sums(given, done, torch.zeros(0), 4))
    assert set(added.values()) == {0.0}
    assert set(numbers(maxima(given, done, 4)).values()) == {0.0}
    assert summarise(added, {})["loss"] == 0


def test_settings_print_every_default_and_name_what_is_wrong() -> None:
    expected = {
        "preset": "grpo",
        "advantage": "grpo",
        "ratio": "token",
        "surrogate": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "correction": "tis",
        "correction_level": "turn",
        "correction_cap": 2.0,
        "aggregation": "token_mean",
    }
    assert {k: v for k, v in ObjectiveSettings().model_dump().items() if k in expected} == expected
    with pytest.raises(ValidationError, match=r"advantage\n.*unknown advantage 'best': use one of"):
        preset("grpo", advantage="best")
    with pytest.raises(ValidationError, match="unknown preset 'ppp': use one of grpo"):
        preset("ppp")
    with pytest.raises(ValidationError, match="clip_lo"):
        preset("grpo", clip_lo=0.1)

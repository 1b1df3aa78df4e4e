"""What is logged: by hand, of everything that is sampled, and of the parts that are chosen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from support.trainer.loss_tokens import made, metrics_of, tokens
from tracegrad_trainer.losses import compute_loss, preset
from tracegrad_trainer.losses.diagnostics import (
    diagnostic_maxima,
    diagnostic_sums,
    summarise_diagnostics,
)


def numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def test_diagnostics_by_hand() -> None:
    given = tokens(
        [-1.0, -1.0, -1.0],
        mu=[-1.0, -1.5, -0.8],
        turn=[0, 0, 1],
        version=[4, 4, 2],
    )
    done = compute_loss(preset("grpo", correction_level="token", correction_cap=1.2), given)
    added = numbers(diagnostic_sums(given, done, torch.tensor([1.0, 2.0, 3.0]), 4))
    metrics = summarise_diagnostics(added, numbers(diagnostic_maxima(given, done, 4)))
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
    assert metrics["difference_lag_2"] == pytest.approx(0.2)
    assert "difference_lag_1" not in metrics
    assert metrics["corrected_share"] == pytest.approx(1 / 3)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(2 / 3), 2)
    assert (metrics["tokens_trained"], metrics["turns_trained"]) == (3, 2)


def test_diagnostics_of_nothing_are_zero() -> None:
    given = tokens([])
    done = compute_loss(preset("grpo"), given)
    added = numbers(diagnostic_sums(given, done, torch.zeros(0), 4))
    assert set(added.values()) == {0.0}
    assert set(numbers(diagnostic_maxima(given, done, 4)).values()) == {0.0}
    assert summarise_diagnostics(added, {})["loss"] == 0


def test_shares_are_of_tokens_and_of_turns() -> None:
    """Turns of 1, 2 and 3 tokens; one token of the last is clipped, one of the second corrected."""
    given = tokens(
        [0.0, 0.0, 0.0, 0.5, 0.0, 0.0],
        old=[0.0] * 6,
        mu=[0.0, -3.0, 0.0, 0.0, 0.0, 0.0],
        advantage=[0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        turn=[0, 1, 1, 2, 2, 2],
    )
    metrics = metrics_of(preset("grpo", correction="mis", correction_level="token"), given)
    assert metrics["clipped_share"] == pytest.approx(1 / 6)
    assert metrics["clipped_turn_share"] == pytest.approx(1 / 3)
    assert metrics["corrected_share"] == metrics["masked_share"] == pytest.approx(1 / 6)
    assert metrics["corrected_turn_share"] == metrics["masked_turn_share"] == pytest.approx(1 / 3)
    assert metrics["no_signal_share"] == pytest.approx(1 / 6)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.5))
    assert metrics["policy_k3"] == pytest.approx((math.exp(0.5) - 1.5) / 6)
    truncated = metrics_of(preset("grpo", correction_level="token"), given)
    assert truncated["corrected_share"] == pytest.approx(1 / 6)
    assert truncated["masked_share"] == 0


def test_an_experts_tokens_are_counted_and_not_diagnosed() -> None:
    logp, mu = [-1.0, -1.0, -1.0], [-1.0, -1.5, 0.0]
    with_expert = tokens(
        logp, mu=mu, turn=[0, 0, 1], version=[4, 4, -1], demonstration=[False, False, True]
    )
    without = tokens(logp[:2], mu=mu[:2], turn=[0, 0], version=[4, 4])
    found = metrics_of(preset("ipa"), with_expert)
    expected = metrics_of(preset("ipa"), without)
    assert found.pop("demonstration_tokens") == 1
    assert expected.pop("demonstration_tokens") == 0
    assert (found.pop("tokens_trained"), found.pop("turns_trained")) == (3, 2)
    of_loss = {"loss", "policy_loss", "tokens_trained", "turns_trained"}
    assert {k: v for k, v in found.items() if k not in of_loss} == pytest.approx(
        {k: v for k, v in expected.items() if k not in of_loss}
    )


def test_by_policy_version_gap() -> None:
    given = tokens(
        [math.log(1.5), 0.0, 0.0],
        old=[0.0] * 3,
        mu=[-0.1, -0.3, 0.2],
        turn=[0, 1, 2],
        version=[3, 3, 4],
    )
    metrics = metrics_of(preset("grpo"), given)
    assert metrics["k1_lag_1"] == pytest.approx(-0.2)
    assert metrics["k1_lag_0"] == pytest.approx(0.2)
    assert metrics["gap_max"] == pytest.approx(0.2)  # not of the older version's
    assert metrics["clipped_lag_1"] == 0.5
    assert metrics["clipped_lag_0"] == 0
    assert metrics["tokens_lag_1"] == 2


def test_the_terms_of_the_loss_are_told_apart() -> None:
    given = made(1)
    settings = preset("ppo", kl="k3", kl_coef=0.1)
    metrics = metrics_of(settings, given)
    terms = metrics["policy_loss"] + metrics["kl_loss"] + metrics["value_loss"]
    assert metrics["loss"] == pytest.approx(terms)
    assert metrics["kl_loss"] > 0
    assert metrics["value_loss"] > 0


def test_kl_to_the_reference_is_logged_whether_or_not_it_is_a_loss() -> None:
    d = np.array([0.5, -0.2, 0.1])
    given = tokens([-1.0] * 3, reference=(-1 - d).tolist())
    metrics = metrics_of(preset("grpo", kl="k1"), given)
    assert metrics["kl_reference"] == pytest.approx((np.exp(-d) - 1 + d).mean())
    assert metrics["kl_reference_k1"] == pytest.approx(d.mean())
    assert metrics["kl_loss"] == 0
    assert "kl_reference" not in metrics_of(preset("grpo"), tokens([-1.0] * 3))


def test_explained_variance_is_numpys() -> None:
    given = made(8, rows=40)
    assert given.value is not None
    assert given.returns is not None
    value = given.value.detach().numpy()[~given.demonstration.numpy()]
    returns = given.returns.numpy()[~given.demonstration.numpy()]
    metrics = metrics_of(preset("ppo"), given)
    expected = 1 - (returns - value).var() / returns.var()
    assert metrics["explained_variance"] == pytest.approx(expected)
    perfect = tokens([-1.0] * 2, value=[1.0, 3.0], old_value=[0.0] * 2, returns=[2.0, 4.0])
    assert metrics_of(preset("ppo"), perfect)["explained_variance"] == pytest.approx(1)
    flat = tokens([-1.0] * 2, value=[1.0, 3.0], old_value=[0.0] * 2, returns=[2.0, 2.0])
    assert metrics_of(preset("ppo"), flat)["explained_variance"] == 0

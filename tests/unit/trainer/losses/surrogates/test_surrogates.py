"""Surrogates by hand, and against NumPy references that know losses and gradients separately."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.trainer.loss_tokens import FIELDS, made, slopes, tokens
from tracegrad_trainer.losses import ObjectiveSettings, Tokens, compute_loss, preset
from tracegrad_trainer.losses.ratios import RATIOS
from tracegrad_trainer.losses.surrogates import SURROGATES

Numbers = NDArray[np.float64]
LN = math.log


def run(settings: ObjectiveSettings, given: Tokens) -> tuple[list[float], list[float], list[bool]]:
    """Losses, their sum's gradient by log pi, and where the clip acted."""
    logs = RATIOS[settings.ratio](given, settings)
    loss, clipped = SURROGATES[settings.surrogate](given, logs, settings)
    return loss.tolist(), slopes(loss.sum(), given), clipped.tolist()


def plain(surrogate: str, **changes: Any) -> ObjectiveSettings:
    return preset("grpo", surrogate=surrogate, correction="none", **changes)


def five(signs: list[float], **changes: Any) -> Tokens:
    """log pi = log r - 1, ratios 1.1, 1.5, 0.5, 1.5, 0.5."""
    r = [1.1, 1.5, 0.5, 1.5, 0.5]
    return tokens([LN(x) - 1 for x in r], old=[-1.0] * 5, advantage=signs, **changes)


GOOD_AND_BAD = [2.0, 2.0, 2.0, -2.0, -2.0]


def test_cispo_by_hand() -> None:
    loss, gradient, clipped = run(plain("cispo", clip_high=0.2), five(GOOD_AND_BAD))
    weight = [1.1, 1.2, 0.5, 1.2, 0.5]
    logp = [LN(1.1) - 1, LN(1.5) - 1, LN(0.5) - 1, LN(1.5) - 1, LN(0.5) - 1]
    assert gradient == pytest.approx([-2.2, -2.4, -1, 2.4, 1])
    assert loss == pytest.approx(
        [-w * a * x for w, a, x in zip(weight, GOOD_AND_BAD, logp, strict=True)]
    )
    assert clipped == [False, True, False, True, False]


def test_reinforce_by_hand() -> None:
    loss, gradient, clipped = run(plain("reinforce"), five(GOOD_AND_BAD))
    assert gradient == [-2, -2, -2, 2, 2]
    assert loss[0] == pytest.approx(-2 * (LN(1.1) - 1))
    assert not any(clipped)


def test_tis_surrogate_by_hand() -> None:
    _, gradient, clipped = run(plain("tis_surrogate"), five(GOOD_AND_BAD))
    assert gradient == pytest.approx([-2, -2, -1, 2, 1])
    assert clipped == [True, True, False, True, False]


def test_topr_splits_on_the_advantage_and_tapers_by_the_rollout() -> None:
    """The second rollout scored above 0 and is a failure all the same; pi/mu counts, not pi/old:
    of the rollouts as a whole 2 x 3 = 6, 2 x 0.1 = 0.2 (in two rows) and 1.5 x 3 = 4.5.
    """
    given = tokens(
        [0.0] * 6,
        old=[-9.0] * 6,
        mu=[-LN(2), -LN(3), -LN(2), -LN(0.1), -LN(1.5), -LN(3)],
        advantage=[1.0, 1.0, -1.0, -1.0, -1.0, -1.0],
        score=[0.0, 0.0, 1.0, 1.0, -1.0, -1.0],
        turn=[0, 0, 1, 2, 3, 3],
        row=[0, 0, 1, 2, 3, 3],
        rollout=[0, 0, 1, 1, 2, 2],
    )
    _, gradient, clipped = run(preset("topr"), given)
    assert gradient == pytest.approx([-1, -1, 0.2, 0.2, 1, 1])
    assert clipped == [False] * 4 + [True] * 2


def test_decoupled_ppo_by_hand() -> None:
    """pi/prox = 1.1 and 1.5, prox/mu = 2 and 10: the latter is over 5, and left out or clamped."""
    given = tokens([LN(1.1), LN(1.5)], old=[0.0, 0.0], mu=[-LN(2), -LN(10)], advantage=[1.0, -1.0])
    loss, gradient, clipped = run(preset("decoupled_ppo"), given)
    assert loss == pytest.approx([-2 * 1.1, 0])
    assert gradient == pytest.approx([-2 * 1.1, 0])
    assert clipped == [False, True]
    loss, gradient, clipped = run(preset("decoupled_ppo", over_cap="clamp"), given)
    assert loss == pytest.approx([-2 * 1.1, 5 * 1.5])
    assert gradient == pytest.approx([-2 * 1.1, 5 * 1.5])
    assert clipped == [False, False]


def test_decoupled_ppo_between_mu_and_pi_by_hand() -> None:
    """mu = 1/4 pi: a quarter of the way from mu, prox = mu^(3/4) pi^(1/4) = pi 4^(-3/4)."""
    given = tokens([LN(0.4)] * 2, old=[-50.0] * 2, mu=[LN(0.1)] * 2, advantage=[-1.0, 1.0])
    settings = preset("decoupled_ppo", prox="interpolated", prox_weight=0.25)
    loss, gradient, clipped = run(settings, given)
    # prox/mu = 4^(1/4), pi/prox = 4^(3/4): the product pi/mu = 4, or the clip's 1.2 in its place.
    assert loss == pytest.approx([4.0, -(4**0.25) * 1.2])
    assert gradient == pytest.approx([4.0, 0.0])
    assert clipped == [False, True]


def test_minirl_by_hand() -> None:
    """r = 1.3, 1.26, 0.79, 0.81 (against old) for good ones, then bad ones; pi/mu = 2, 7."""
    r = [1.3, 1.26, 0.79, 0.81] * 2
    w = [2.0] * 4 + [7.0] * 4
    given = tokens(
        [-1.0] * 8,
        old=[-1 - LN(x) for x in r],
        mu=[-1 - LN(x) for x in w],
        advantage=[1.0] * 4 + [-1.0] * 4,
    )
    loss, gradient, masked = run(preset("minirl"), given)
    assert gradient == pytest.approx([0, -2, -2, -2, 5, 5, 0, 5])
    assert loss == pytest.approx([-g * 1.0 for g in gradient])
    assert masked == [True] + [False] * 5 + [True, False]


def test_signed_prob_mask_by_hand() -> None:
    """p_pi, p_mu: 0.5 and 0.2 (more by 0.3), 0.4 and 0.3, 0.2 and 0.5 (less by 0.3)."""
    now, then = [0.5, 0.4, 0.2] * 2, [0.2, 0.3, 0.5] * 2
    advantage = [1.0] * 3 + [-1.0] * 3
    given = tokens([LN(p) for p in now], mu=[LN(p) for p in then], advantage=advantage)
    loss, gradient, masked = run(preset("signed_prob_mask"), given)
    assert masked == [True, False, False, False, False, True]
    logs = [LN(p / q) for p, q in zip(now, then, strict=True)]
    gain = [0 if m else p / q * a for p, q, a, m in zip(now, then, advantage, masked, strict=True)]
    assert loss == pytest.approx([1e-3 * x * x - g for x, g in zip(logs, gain, strict=True)])
    assert gradient == pytest.approx([2e-3 * x - g for x, g in zip(logs, gain, strict=True)])


def test_ipa_by_hand() -> None:
    """Turns with ratios 2 (good), 2 (bad), 0.5 (bad), 1 (no return) and two of an expert's."""
    ratios = [2.0, 2.0, 0.5, 1.0, 4.0, 4.0]
    given = tokens(
        [-1.0] * 6,
        old=[-1 - LN(x) for x in ratios],
        advantage=[1.0, -1.0, -1.0, 0.0, 1.0, -1.0],
        turn=[0, 1, 2, 3, 4, 5],
        demonstration=[False] * 4 + [True] * 2,
    )
    _, gradient, clipped = run(preset("ipa", imitation=0.3, reinforcement=0.5), given)
    assert gradient == pytest.approx([-0.5, 0.5, 0.25, 0, -0.3, 0])
    assert clipped == [False, True, False, False, False, False]


def test_ipa_truncates_the_ratio_of_the_whole_turn() -> None:
    """Ratios 4 and 1/16 of one bad turn: together 1/2, and neither is looked at by itself."""
    given = tokens([-1.0] * 2, old=[-1 - LN(4), -1 + LN(16)], advantage=[-1.0] * 2)
    _, gradient, _ = run(preset("ipa"), given)
    assert gradient == pytest.approx([0.5, 0.5])


def test_sft_by_hand() -> None:
    loss, gradient, _ = run(
        preset("sft"), tokens([-1.0, -3.0], advantage=[5.0, -5.0], demonstration=[True, False])
    )
    assert loss == [1, 3]
    assert gradient == [-1, -1]


# References: the settings and NumPy arrays -> loss, gradient by log pi.
Reference = Callable[[ObjectiveSettings, dict[str, Numbers]], tuple[Numbers, Numbers]]


def by_weight(weight: Numbers, x: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
    """-weight A log pi with a weight that carries no gradient."""
    return -weight * x["advantage"] * x["logp"], -weight * x["advantage"]


def np_ppo(s: ObjectiveSettings, x: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
    low, high, c, a, r = 1 - s.clip_low, 1 + s.clip_high, s.dual_clip, x["advantage"], x["r"]
    outside = np.where(a > 0, r > high, r < low)
    bound = np.where(a > 0, high, low)
    if c is not None:
        outside, bound = outside | ((a < 0) & (r > c)), np.where((a < 0) & (r > c), c, bound)
    return np.where(outside, -bound * a, -r * a), np.where(outside, 0, -r * a)


def np_decoupled(s: ObjectiveSettings, x: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
    w = np.exp(x["old"] - x["mu"])
    w = np.where(w <= s.correction_cap, w, 0)
    loss, gradient = np_ppo(s, x)
    return w * loss, w * gradient


def np_minirl(s: ObjectiveSettings, x: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
    a, r = x["advantage"], x["r"]
    stay = ~(((a > 0) & (r > s.mask_high)) | ((a < 0) & (r < s.mask_low)))
    return by_weight(stay * np.minimum(np.exp(x["logp"] - x["mu"]), s.correction_cap), x)


def np_signed(s: ObjectiveSettings, x: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
    d, a = x["logp"] - x["mu"], x["advantage"]
    change = np.exp(x["logp"]) - np.exp(x["mu"])
    stay = np.where(a > 0, change <= s.prob_bound, change >= -s.prob_bound)
    gain = stay * np.exp(d) * a
    return s.prob_penalty * d**2 - gain, 2 * s.prob_penalty * d - gain


REFERENCES: dict[str, Reference] = {
    "ppo": np_ppo,
    "cispo": lambda s, x: by_weight(np.minimum(x["r"], 1 + s.clip_high), x),
    "reinforce": lambda s, x: by_weight(np.ones_like(x["r"]), x),
    "tis_surrogate": lambda s, x: by_weight(np.minimum(x["r"], 1), x),
    "topr": lambda s, x: by_weight(
        np.where(x["advantage"] > 0, 1, np.minimum(np.exp(x["logp"] - x["mu"]), 1)), x
    ),
    "decoupled_ppo": np_decoupled,
    "minirl": np_minirl,
    "signed_prob_mask": np_signed,
}


@pytest.mark.parametrize(
    ("name", "dual_clip"), [*((name, None) for name in REFERENCES), ("ppo", 1.5)]
)
def test_loss_and_gradient_are_the_references(name: str, dual_clip: float | None) -> None:
    given = made(5, rows=200, spread=0.6)
    settings = plain(name, dual_clip=dual_clip)
    loss, gradient, clipped = run(settings, given)
    x = {name: getattr(given, field).detach().numpy() for name, field in FIELDS.items()}
    x["r"] = np.exp(x["logp"] - x["old"])
    expected, slope = REFERENCES[name](settings, x)
    expert = given.demonstration.numpy()
    np.testing.assert_allclose(loss, np.where(expert, 0, expected), rtol=1e-12)
    np.testing.assert_allclose(gradient, np.where(expert, 0, slope), rtol=1e-12, atol=1e-15)
    assert 50 < expert.sum() < 400
    assert not np.any(np.array(clipped) & expert)
    assert any(clipped) == (name != "reinforce")


@pytest.mark.parametrize("name", ["token", "turn", "product"])
def test_ppo_has_the_gradient_of_finite_differences_at_every_granularity(name: str) -> None:
    """At that of the product with one advantage a rollout."""
    given = made(2, rows=5, spread=0.05)
    if name == "product":
        given = replace(given, advantage=torch.linspace(-1, 1, given.rollouts)[given.rollout])
    settings = plain("ppo", ratio=name, clip_low=0.9, clip_high=9.0)

    def of(logp: torch.Tensor) -> torch.Tensor:
        moved = replace(given, policy_logprobs=logp)
        return SURROGATES["ppo"](moved, RATIOS[name](moved, settings), settings)[0].sum()

    assert torch.autograd.gradcheck(of, (given.policy_logprobs,))


def test_gspo_is_the_papers_gradient() -> None:
    """d/d log pi of -mean over rows of s A is -s A / T for each of a row's T tokens."""
    given = tokens(
        [0.1, 0.3, -0.2, 0.05],
        old=[0.0] * 4,
        advantage=[2.0, 2.0, 2.0, -1.0],
        turn=[0, 0, 1, 2],
        row=[0, 0, 0, 1],
    )
    settings = preset("gspo", clip_low=0.5, clip_high=0.5, correction="none")
    done = compute_loss(settings, given)
    first, second = math.exp(0.2 / 3), math.exp(0.05)
    expected = [-first * 2 / 3 / 2] * 3 + [second / 2]
    assert slopes(done.total / done.units, given) == pytest.approx(expected)
    assert done.total.item() / 2 == pytest.approx((-first * 2 + second) / 2)


def test_gspo_clips_rows_whole_at_its_narrow_bounds() -> None:
    given = tokens(
        [0.01, -0.0094, 3.9e-4, 4.1e-4, -2.9e-4, -3.1e-4],
        old=[0.0] * 6,
        advantage=[1.0, 1.0, 1.0, 1.0, -1.0, -1.0],
        turn=[0, 0, 1, 2, 3, 4],
        row=[0, 0, 1, 2, 3, 4],
    )
    done = compute_loss(preset("gspo"), given)
    assert done.clipped.tolist() == [False, False, False, True, False, True]
    moved = [slope != 0 for slope in slopes(done.total, given)]
    assert moved == [True, True, True, False, True, False]

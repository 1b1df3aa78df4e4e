"""Ratios and mismatch corrections at every level: by hand, and where an expert's tokens are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.trainer.loss_tokens import made, slopes, tokens
from tracegrad_trainer.losses import Tokens, compute_loss, preset
from tracegrad_trainer.losses.ratios import RATIOS

PLAIN = preset("grpo", correction="none")
# Of three tokens, two turns in one row, and a row of one token.
R = [1.2, 0.9, 1.1, 0.5]


def four(**changes: Any) -> Tokens:
    logs = [math.log(r) for r in R]
    return tokens(logs, old=[0.0] * 4, turn=[0, 0, 1, 2], row=[0, 0, 0, 1], **changes)


def ratios(name: str, given: Tokens) -> list[float]:
    return RATIOS[name](given, PLAIN).exp().tolist()


def ratio_slopes(name: str, given: Tokens) -> list[float]:
    """d(sum of ratios) / d log pi."""
    return slopes(RATIOS[name](given, PLAIN).exp().sum(), given)


def test_each_granularity_by_hand() -> None:
    turn, row = math.sqrt(1.2 * 0.9), (1.2 * 0.9 * 1.1) ** (1 / 3)
    assert ratios("token", four()) == pytest.approx(R)
    assert ratios("turn", four()) == pytest.approx([turn, turn, 1.1, 0.5])
    assert ratios("sequence", four()) == pytest.approx([row, row, row, 0.5])
    assert ratios("product", four()) == pytest.approx([1.188] * 3 + [0.5])


def test_gradients_by_hand() -> None:
    turn, row = math.sqrt(1.2 * 0.9), (1.2 * 0.9 * 1.1) ** (1 / 3)
    assert ratio_slopes("token", four()) == pytest.approx(R)
    # Each of the turn's two tokens moves both ratios by half.
    assert ratio_slopes("turn", four()) == pytest.approx([turn, turn, 1.1, 0.5])
    # Straight through: a token moves its own ratio only, and wholly.
    assert ratio_slopes("sequence", four()) == pytest.approx([row, row, row, 0.5])
    assert ratio_slopes("product", four()) == pytest.approx([3 * 1.188] * 3 + [0.5])


@pytest.mark.parametrize("name", ["turn", "product"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Of the product that of its sum over the tokens, which is left to each as its own."""
    given = made(3, rows=4)

    def of(logp: torch.Tensor) -> torch.Tensor:
        found = RATIOS[name](_with(given, logp), PLAIN)
        return found.sum() if name == "product" else found

    assert torch.autograd.gradcheck(of, (given.policy_logprobs,))


def _with(given: Tokens, logp: torch.Tensor) -> Tokens:
    return replace(given, policy_logprobs=logp)


@pytest.mark.parametrize("name", list(RATIOS))
def test_no_ratio_leaves_what_exp_can_hold(name: str) -> None:
    halves = [0] * 4 + [1] * 4
    far = tokens([0.0] * 8, old=[-100.0] * 4 + [100.0] * 4, turn=halves, row=halves)
    assert ratios(name, far) == pytest.approx([math.exp(20)] * 4 + [math.exp(-20)] * 4)


def test_beyond_its_bound_a_product_has_no_gradient() -> None:
    """Rows whose logs come to 21 and to 19.5."""
    far = tokens([0.0] * 4, old=[-10.5] * 2 + [-9.75] * 2, turn=[0, 0, 1, 1], row=[0, 0, 1, 1])
    within = 2 * math.exp(19.5)
    assert ratio_slopes("product", far) == pytest.approx([0, 0, within, within])


@pytest.mark.parametrize("name", list(RATIOS))
def test_an_experts_tokens_enter_no_ratio(name: str) -> None:
    """The second turn is the expert's: the others' ratios are as if it were not there."""
    odd = four(demonstration=[False, False, True, False])
    without = tokens(
        [math.log(R[0]), math.log(R[1]), math.log(R[3])],
        old=[0.0] * 3,
        turn=[0, 0, 1],
        row=[0, 0, 1],
    )
    found = ratios(name, odd)
    assert found[2] == 1
    assert found[:2] + found[3:] == pytest.approx(ratios(name, without))
    assert ratio_slopes(name, odd)[2] == 0


# Corrections: w of four tokens, two turns of one row and a row of one.
W = [4.0, 0.5, 3.0, 0.9]


def weights(correction: str, level: str, **changes: Any) -> tuple[list[float], list[bool]]:
    """What -log pi is weighed by, read off its gradient, and what the correction changed."""
    given = tokens([0.0] * 4, mu=[-math.log(w) for w in W], turn=[0, 0, 1, 2], row=[0, 0, 0, 1])
    chosen = {"correction": correction}
    if correction != "none":
        chosen["correction_level"] = level
    done = compute_loss(preset("grpo", surrogate="reinforce", **chosen, **changes), given)
    return [-slope for slope in slopes(done.total, given)], done.corrected.tolist()


TURN = math.sqrt(4 * 0.5)
ROW = (4 * 0.5 * 3) ** (1 / 3)


@pytest.mark.parametrize(
    ("correction", "level", "expected"),
    [
        ("none", "token", [1, 1, 1, 1]),
        ("tis", "token", [2, 0.5, 2, 0.9]),
        ("tis", "turn", [TURN, TURN, 2, 0.9]),
        ("tis", "sequence", [ROW, ROW, ROW, 0.9]),
        ("mis", "token", [0, 0, 0, 0.9]),
        ("mis", "turn", [TURN, TURN, 0, 0.9]),
        ("mis", "sequence", [ROW, ROW, ROW, 0.9]),
        ("reject", "token", [0, 0, 0, 1]),
        ("reject", "turn", [1, 1, 0, 1]),
        ("reject", "sequence", [1, 1, 1, 1]),
    ],
)
def test_corrections_by_hand(correction: str, level: str, expected: list[float]) -> None:
    floor = 0.0 if correction in ("none", "tis") else 0.6
    changes = {"correction_floor": floor} if floor else {}
    found, touched = weights(correction, level, **changes)
    assert found == pytest.approx(expected)
    levels = {"token": W, "turn": [TURN, TURN, 3, 0.9], "sequence": [ROW] * 3 + [0.9]}[level]
    bad = [w > 2 or w < floor for w in levels]
    assert touched == ([False] * 4 if correction == "none" else bad)


@pytest.mark.parametrize(
    ("stat", "values"),
    [
        ("k1", [abs(math.log(TURN))] * 2 + [math.log(3), -math.log(0.9)]),
        ("k2", [(math.log(4) ** 2 + math.log(0.5) ** 2) / 4] * 2 + [math.log(3) ** 2 / 2, 0.00555]),
        ("k3", [(4 - 1 - math.log(4) + 0.5 - 1 - math.log(0.5)) / 2] * 2 + [0.90139, 0.00536]),
    ],
)
def test_reject_is_by_the_mean_of_its_statistic(stat: str, values: list[float]) -> None:
    for bound in (0.01, 0.5, 0.7, 1.0):
        found, _ = weights("reject", "turn", reject_stat=stat, correction_cap=bound)
        assert found == [float(value <= bound) for value in values]


@pytest.mark.parametrize("stat", ["ratio", "k1", "k2", "k3"])
def test_what_both_engines_agree_on_is_not_rejected(stat: str) -> None:
    """w is 1 and the other statistics are 0, which is their floor unless another is set."""
    chosen = {"correction": "reject", "correction_level": "turn", "reject_stat": stat}
    done = compute_loss(preset("grpo", **chosen), tokens([-1.0, -2.0], turn=[0, 1]))
    assert done.weight.tolist() == [1, 1]
    assert not done.corrected.any()


@pytest.mark.parametrize(("floor", "cap"), [(1.0, 2.0), (0.5, 1.0)])
def test_the_bounds_of_w_are_within(floor: float, cap: float) -> None:
    bounds = {"correction_floor": floor, "correction_cap": cap}
    done = compute_loss(preset("grpo", correction="mis", **bounds), tokens([-1.0]))
    assert done.weight.tolist() == [1]


def test_icepop_is_mis_of_tokens() -> None:
    found, _ = weights("mis", "token", correction_floor=0.5, correction_cap=5.0)
    assert found == pytest.approx(W)
    found, _ = weights("mis", "token", correction_floor=0.6, correction_cap=3.5)
    assert found == pytest.approx([0, 0, 3, 0.9])


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_an_experts_tokens_have_no_mismatch(level: str) -> None:
    """mu of an expert's token is nothing that anybody recorded, here as far off as can be."""
    given = tokens(
        [-1.0] * 3,
        mu=[-1.0 - math.log(1.5), -1.0, -90.0],
        turn=[0, 0, 1],
        demonstration=[False, False, True],
    )
    settings = preset("ipa", correction="tis", correction_level=level, imitation=1.0)
    done = compute_loss(settings, given)
    w = [1.5, 1.0] if level == "token" else [math.sqrt(1.5)] * 2
    assert slopes(done.total, given) == pytest.approx([-w[0], -w[1], -1.0])
    assert done.log_w.exp().tolist() == pytest.approx([*w, 1.0])
    assert done.corrected.tolist() == [False] * 3
    assert done.masked.tolist() == [False] * 3


def test_a_turn_is_masked_whole_and_neighbours_do_not_merge() -> None:
    """Two turns without a token between them: one is rejected, all of it, and not the other."""
    given = tokens([0.0] * 4, mu=[-3.0, 0.0, 0.0, 0.0], turn=[0, 0, 1, 1])
    done = compute_loss(preset("ipa"), given)
    assert slopes(done.total, given) == [0, 0, -1, -1]
    assert done.masked.tolist() == [True, True, False, False]
    # What is masked stays in the denominator.
    assert done.units.item() == 4


def test_a_mask_of_tokens_does_not_change_the_ratio_of_their_turn() -> None:
    """The second token is rejected by itself; its turn's ratio is of both all the same."""
    given = tokens([0.2, 0.4], old=[0.0, 0.0], mu=[0.0, -3.0])
    settings = preset("grpo", ratio="turn", correction="reject", correction_level="token")
    done = compute_loss(settings, given)
    assert done.masked.tolist() == [False, True]
    assert done.log_ratio.tolist() == pytest.approx([0.3, 0.3])
    # The clip at 1.2 holds the first token's turn, whose ratio is exp(0.3); below it, half each.
    assert slopes(done.total, given) == [0, 0]
    wide = compute_loss(
        preset("grpo", **settings.model_dump(exclude={"preset", "clip_high"}), clip_high=1.0), given
    )
    assert slopes(wide.total, given) == pytest.approx([-math.exp(0.3) / 2] * 2)

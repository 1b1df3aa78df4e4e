"""DPO and KTO: losses of whole rows, by hand and by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.trainer.loss_tokens import made, metrics_of, part, slopes, tokens
from tracegrad_trainer.losses import Tokens, compute_loss, preset


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def two_pairs() -> Tokens:
    """Rows 0 and 3 are a pair, 2 and 1 the other (chosen first); rows of 2, 1, 1, 3 targets, the
    last one of two turns.

    log pi - ref of the rows: 1.0, 0.5, -0.5, -2.0.
    """
    row = [0, 0, 1, 2, 3, 3, 3]
    return tokens(
        [-1.0, -1.0, -1.0, -2.0, -1.0, -2.0, -3.0],
        reference=[-1.5, -1.5, -1.5, -1.5, -1.0, -2.0, -1.0],
        turn=[0, 0, 1, 2, 3, 3, 4],
        row=row,
        pair=[7, 3, 3, 7],
        label=[1, -1, 1, -1],
    )


def test_dpo_by_hand() -> None:
    given = two_pairs()
    done = compute_loss(preset("dpo"), given)
    margins = [1.0 - -2.0, -0.5 - 0.5]
    assert done.units.item() == 2
    assert done.total.item() == pytest.approx(sum(-math.log(sigmoid(0.1 * m)) for m in margins))
    push = [0.1 * sigmoid(-0.1 * m) for m in margins]
    expected = [-push[0]] * 2 + [push[1], -push[1]] + [push[0]] * 3
    assert slopes(done.total, given) == pytest.approx(expected)


def test_a_pair_that_lost_a_row_is_no_pair() -> None:
    """A row leaves a step when its numbers are not finite; its partner must not stay alone."""
    given = part(two_pairs(), [0, 1, 2])
    done = compute_loss(preset("dpo"), given)
    assert done.units.item() == 1
    assert done.total.item() == pytest.approx(-math.log(sigmoid(-0.1)))
    alone = compute_loss(preset("dpo"), part(two_pairs(), [0]))
    assert (alone.units.item(), alone.total.item()) == (0, 0)


def test_a_side_of_several_rows_is_their_sum() -> None:
    """A rollout that forked: rows 0 and 1 together are what was chosen."""
    row = [0, 1, 2]
    given = tokens(
        [-1.0] * 3,
        reference=[-2.0, -2.0, -4.0],
        turn=row,
        row=row,
        pair=[0, 0, 0],
        label=[1, 1, -1],
    )
    done = compute_loss(preset("dpo", beta=0.5), given)
    assert done.total.item() == pytest.approx(-math.log(sigmoid(0.5 * (1 + 1 - 3))))
    assert done.units.item() == 1


def test_kto_by_hand() -> None:
    given = replace(two_pairs(), kto_z=torch.tensor(0.4, dtype=torch.float64))
    done = compute_loss(preset("kto"), given)
    gains, labels = [1.0, 0.5, -0.5, -2.0], [1, -1, 1, -1]
    losses = [
        1 - sigmoid(0.1 * (gain - 0.4) * label) for gain, label in zip(gains, labels, strict=True)
    ]
    assert done.units.item() == 4
    assert done.total.item() == pytest.approx(sum(losses))
    steepness = [-0.1 * label * x * (1 - x) for label, x in zip(labels, losses, strict=True)]
    expected = [steepness[0]] * 2 + steepness[1:3] + [steepness[3]] * 3
    assert slopes(done.total, given) == pytest.approx(expected)


def test_kto_leaves_rows_without_a_label_alone() -> None:
    given = replace(
        two_pairs(),
        kto_z=torch.tensor(0.0, dtype=torch.float64),
        label=torch.tensor([1, 0, 0, -1]),
    )
    done = compute_loss(preset("kto"), given)
    assert done.units.item() == 2
    moved = [slope != 0 for slope in slopes(done.total, given)]
    assert moved == [True, True, False, False, True, True, True]


@pytest.mark.parametrize("name", ["dpo", "kto", "sft"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    given = made(4, rows=6)

    def of(logp: Tensor) -> Tensor:
        return compute_loss(preset(name), replace(given, policy_logprobs=logp)).total

    assert torch.autograd.gradcheck(of, (given.policy_logprobs,))


def test_what_became_likelier_is_logged() -> None:
    given = two_pairs()
    metrics = metrics_of(preset("dpo"), given)
    assert metrics["chosen_gain"] == pytest.approx((1.0 - 0.5) / 2)
    assert metrics["rejected_gain"] == pytest.approx((0.5 - 2.0) / 2)
    assert metrics["pair_accuracy"] == 0.5

"""Products of old/mu over turns and rollouts: by hand, against NumPy, and whatever the layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.trainer import layout_ranks
from support.trainer.layout_ranks import BUDGET, made
from support.trainer.loss_tokens import made as made_tokens
from support.trainer.loss_tokens import metrics_of, micro_batches, tokens
from support.trainer.row_samples import tiny_model
from tracegrad_trainer.batches import pack
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.step.rollout_sums import with_rollout_sums
from tracegrad_trainer.losses import Tokens, compute_loss, preset


def one_bad_token(off: float, **more: Any) -> Tokens:
    """Four turns of 200 tokens; of the last one's tokens one is `off` nats from mu."""
    n = 800
    mu = [-1.0] * n
    mu[700] -= off
    turn = [i // 200 for i in range(n)]
    return tokens([-1.0] * n, mu=mu, turn=turn, version=[4] * n, **more)


def test_a_single_token_off_shows_in_a_product_and_not_in_a_mean() -> None:
    bad = one_bad_token(6.0)
    mean = compute_loss(preset("grpo", correction_level="turn"), bad)
    assert float(mean.weight.max()) == pytest.approx(math.exp(6 / 200), rel=1e-6)
    assert not mean.corrected.any()
    product = compute_loss(preset("grpo", correction_level="turn_product"), bad)
    assert product.weight.tolist() == [1.0] * 600 + [2.0] * 200
    assert product.corrected.tolist() == [False] * 600 + [True] * 200
    assert product.log_w[-1].item() == pytest.approx(6.0)
    rejected = preset("grpo", correction="reject", correction_level="turn_product")
    assert compute_loss(rejected, bad).masked.tolist() == [False] * 600 + [True] * 200


def test_its_sample_size_and_variance_are_reported() -> None:
    """Weights 1, 1, 1, 2: (sum w)^2 / (4 sum w^2) = 25/28, variance 7/4 - (5/4)^2 = 3/16."""
    found = metrics_of(preset("grpo", correction_level="turn_product"), one_bad_token(6.0))
    assert found["weight_ess"] == pytest.approx(25 / 28)
    assert found["weight_variance"] == pytest.approx(3 / 16)
    # Before the cap, whatever level corrects.
    w = np.array([1, 1, 1, math.exp(6.0)])
    for level in ("token", "turn", "turn_product"):
        every = metrics_of(preset("grpo", correction_level=level), one_bad_token(6.0))
        assert every["product_max_w"] == pytest.approx(math.exp(6.0))
        assert every["product_ess"] == pytest.approx(w.sum() ** 2 / (4 * (w**2).sum()))
    hidden = metrics_of(preset("grpo", correction_level="turn"), one_bad_token(6.0))
    assert hidden["weight_variance"] < 2e-4
    assert hidden["turn_max_w"] < 1.04


def test_a_token_that_mu_thought_too_likely_takes_its_turn_down() -> None:
    done = compute_loss(preset("grpo", correction_level="turn_product"), one_bad_token(-6.0))
    assert done.weight[-1].item() == pytest.approx(math.exp(-6))
    mean = compute_loss(preset("grpo", correction_level="turn"), one_bad_token(-6.0))
    assert mean.weight[-1].item() > 0.97


def test_the_product_over_a_rollout_is_of_all_its_rows() -> None:
    """Rows of log w (0.3, 0.1) and (0.4): of the rollout exp(0.8), whichever row a token is in."""
    log_w = [0.3, 0.1, 0.4, -0.5]
    given = tokens(
        [-1.0] * 4,
        mu=[-1.0 - w for w in log_w],
        turn=[0, 0, 1, 2],
        row=[0, 0, 1, 2],
        rollout=[0, 0, 0, 1],
    )
    settings = preset("grpo", correction_level="sequence_product", correction_cap=10.0)
    w = math.exp(0.8), math.exp(-0.5)
    done = compute_loss(settings, given)
    assert done.weight.tolist() == pytest.approx([w[0]] * 3 + [w[1]])
    found = metrics_of(settings, given)
    assert found["weight_ess"] == pytest.approx(sum(w) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2)))
    assert found["weight_variance"] == pytest.approx(np.var(w))


def test_products_are_bounded_however_long_a_turn_is() -> None:
    """5,000 tokens at w = e, one after the other, are no infinity."""
    n = 5000
    done = compute_loss(
        preset("grpo", correction_level="turn_product", correction_cap=1e30),
        tokens([-1.0] * n, mu=[-2.0] * n),
    )
    assert done.weight.tolist() == pytest.approx([math.exp(20)] * n)


@pytest.mark.parametrize("level", ["turn_product", "sequence_product"])
@pytest.mark.parametrize(("stat", "found"), [("k1", 40.0), ("k2", 20.0), ("k3", 40 / math.e)])
def test_what_is_rejected_by_a_sum_has_no_bound_of_its_own(
    level: str, stat: str, found: float
) -> None:
    """Forty tokens of log w = -1: no cap is out of reach."""
    given = tokens([-1.0] * 40, mu=[0.0] * 40)
    chosen = {"correction": "reject", "correction_level": level, "reject_stat": stat}
    for cap, masked in ((found * 0.99, True), (found * 1.01, False)):
        # below the logs' own bound and above it
        for times in (1, 3):
            many = given if times == 1 else tokens([-1.0] * 120, mu=[0.0] * 120)
            done = compute_loss(preset("grpo", **chosen, correction_cap=cap * times), many)
            assert done.masked.tolist() == [masked] * len(many)


@pytest.mark.parametrize("level", ["sequence", "sequence_product"])
def test_a_rollout_with_a_demonstration_is_one_weight_like_the_others(level: str) -> None:
    """Two rollouts of weights 2 and 1/2; of the second nine tokens of ten are an expert's."""
    given = tokens(
        [-1.0] * 11,
        mu=[-1.0 - math.log(2)] + [0.0] * 9 + [-1.0 + math.log(2)],
        turn=[0] + [1] * 9 + [2],
        row=[0] + [1] * 10,
        rollout=[0] + [1] * 10,
        demonstration=[False] + [True] * 9 + [False],
    )
    found = metrics_of(preset("grpo", correction_level=level, correction_cap=10.0), given)
    assert found["weight_ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert found["weight_variance"] == pytest.approx(0.75**2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["turn_product", "sequence_product"]))
def test_weights_are_numpys_and_no_split_moves_them(seed: int, level: str) -> None:
    whole = made_tokens(seed, rows=8)
    chosen = preset("grpo", correction_level=level, aggregation="group_mean")
    done = compute_loss(chosen, whole)
    expert = whole.demonstration.numpy()
    log_w = np.where(expert, 0, (whole.old_logprobs - whole.rollout_logprobs).detach().numpy())
    of = (whole.turn if level == "turn_product" else whole.rollout).numpy()
    product = np.exp([log_w[of == k].sum() for k in of])
    expected = np.where(expert, 1, np.minimum(product, 2.0))
    np.testing.assert_allclose(done.weight.numpy(), expected, rtol=1e-9)
    found = metrics_of(chosen, whole)
    parts = micro_batches(chosen, whole, [[0, 3, 4], [1], [2, 5, 6, 7]])
    split = [compute_loss(chosen, one).total for one in parts]
    assert sum(one.item() for one in split) == pytest.approx(done.total.item(), rel=1e-9, abs=1e-12)
    other = metrics_of(chosen, *parts)
    for name in ("weight_ess", "weight_variance", "product_ess", "product_max_w", "ess"):
        assert other[name] == pytest.approx(found[name], rel=1e-9, abs=1e-12), name
    # Independently, one weight a turn (or rollout) that has a sampled token.
    share = {k: float((~expert[of == k]).any()) for k in set(of)}
    w = {k: np.minimum(product[of == k][0], 2.0) for k in share}
    n, total = sum(share.values()), sum(share[k] * w[k] for k in w)
    square = sum(share[k] * w[k] ** 2 for k in w)
    assert found["weight_ess"] == pytest.approx(total**2 / (n * square))
    assert found["weight_variance"] == pytest.approx(square / n - (total / n) ** 2, abs=1e-9)


def test_no_gradient_flows_through_the_weight() -> None:
    whole = made_tokens(3)
    chosen = preset("grpo", correction_level="turn_product", surrogate="reinforce")
    assert not compute_loss(chosen, whole).weight.requires_grad

    def loss(logp: Tensor) -> Tensor:
        return compute_loss(chosen, replace(whole, policy_logprobs=logp)).total

    assert torch.autograd.gradcheck(loss, (whole.policy_logprobs,))


@pytest.mark.parametrize("given_old", [False, True])
def test_each_rollout_is_added_up_over_rows_and_micro_batches(
    tmp_path: Path, one_rank: None, given_old: bool
) -> None:
    tiny_model(tmp_path / "model")
    learner = layout_ranks.learner(tmp_path, "by_group")
    rows = made("by_group")
    old: dict[int, np.ndarray[Any, Any]] = {}
    [everything] = pack(rows, ranks=1, budget=10_000)[0]
    [logp] = learner.logprobs([everything])
    for key in range(len(rows)):
        old[key] = logp.numpy()[everything.row == everything.row_keys.tolist().index(key)]
    expected: dict[str, float] = {}
    for key, row in enumerate(rows):
        mu = row.rollout_logprobs[row.keep]
        total = float((old[key].astype(np.float64) - mu).sum())
        expected[row.rollout_id] = expected.get(row.rollout_id, 0.0) + total
    batches = pack(rows, ranks=1, budget=BUDGET)[0]
    assert len(batches) > 3
    engine = learner.engine
    known = [
        TargetContext(old_logprobs=o) if given_old else TargetContext()
        for o in learner.logprobs(batches)
    ]
    summed = with_rollout_sums(engine, learner.objective, engine.inputs(batches), known)
    for batch, before in zip(batches, summed, strict=True):
        assert before.rollout_sums is not None
        of_rollouts = before.rollout_sums[0]
        for number, key in enumerate(batch.row_keys.tolist()):
            here = of_rollouts[torch.from_numpy(batch.rollout[batch.row == number])]
            wanted = [expected[rows[key].rollout_id]] * len(here)
            assert here.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_a_row_that_is_not_finite_takes_its_rollout_with_it(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path / "model")
    chosen = preset("grpo", correction_level="sequence_product")
    monkeypatch.setitem(layout_ranks.OBJECTIVES, "product", chosen)
    result, gradients = layout_ranks.poisoned(tmp_path, "product")
    assert result.dropped == (4, 5), "the whole rollout: what is summed over it is not known"
    _, expected = layout_ranks.without(tmp_path, "product", (4, 5))
    for name, found in gradients.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)

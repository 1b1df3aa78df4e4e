"""A rollout is the unit, rows are not: the same sampled tokens with the same log-probabilities have
the same gradient, however a rollout's turns fall into rows, micro-batches and their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as for_any
from hypothesis import settings as run
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from support.trainer.loss_tokens import FIELDS, dealt, made, micro_batches, tokens
from tracegrad_trainer.losses import PRESETS, ObjectiveSettings, Tokens, compute_loss, preset
from tracegrad_trainer.losses.diagnostics import diagnostic_maxima, diagnostic_sums
from tracegrad_trainer.losses.part_names import PARTS

Numbers = NDArray[np.float64]


def settings_of(name: str) -> ObjectiveSettings:
    if name in ("dpo", "kto"):
        return preset(name)
    bonus = {} if name == "sft" else {"entropy_coef": 0.05}
    return preset(name, kl="k3", kl_coef=0.1, **bonus)


def parts() -> list[ObjectiveSettings]:
    """Every way to put parts together that settings let through, on top of `grpo`."""
    kinds = ("ratio", "surrogate", "correction", "correction_level", "aggregation")
    found = []
    for chosen in product(*(PARTS[kind] for kind in kinds)):
        try:
            found.append(preset("grpo", **dict(zip(kinds, chosen, strict=True))))
        except ValidationError:
            continue
    return found


COMBINED = parts()


def chained(given: Tokens) -> Tokens:
    """The same tokens, one row a rollout."""
    first = torch.stack([(given.rollout == r).int().argmax() for r in range(given.rollouts)])
    row = given.row[first]
    return replace(
        given,
        row=given.rollout,
        rows=given.rollouts,
        pair=given.pair[row],
        label=given.label[row],
    )


def laid_out(given: Tokens, rng: np.random.Generator) -> tuple[Tokens, Tensor]:
    """Each turn in some row of its rollout, turns in any order; and where each token came from."""
    of_turn = torch.stack([(given.turn == t).int().argmax() for t in range(given.turns)])
    drawn = torch.from_numpy(rng.integers(0, 3, given.turns))
    key = given.rollout[of_turn] * 3 + drawn
    used, row_of_turn = torch.unique(key, return_inverse=True)
    order = np.argsort(rng.permutation(given.turns)[given.turn.numpy()], kind="stable")
    where = torch.from_numpy(order)
    whole = chained(given)
    moved: dict[str, Any] = {
        field.name: value[where]
        for field in fields(Tokens)
        if isinstance(value := getattr(given, field.name), Tensor) and len(value.shape)
        if value.shape[0] == len(given)
    }
    moved |= {
        "row": row_of_turn[given.turn][where],
        "rows": len(used),
        "pair": whole.pair[used // 3],
        "label": whole.label[used // 3],
    }
    return replace(given, **moved), where


def gradient(
    settings: ObjectiveSettings, given: list[Tokens], logp: Tensor
) -> tuple[Tensor, float]:
    done = [compute_loss(settings, one) for one in given]
    total = torch.stack([one.total for one in done]).sum()
    (slope,) = torch.autograd.grad(total + 0 * logp.sum(), [logp], retain_graph=True)
    return slope, float(sum(one.units for one in done))


def check(settings: ObjectiveSettings, seed: int, ways: list[int]) -> None:
    whole = chained(made(seed, rows=6))
    whole = replace(whole, entropy=whole.policy_logprobs.square())
    expected, units = gradient(settings, [whole], whole.policy_logprobs)
    assert expected.abs().sum() > 0 or units == 0 or not settings.learns_from_demonstrations
    fallen, _ = laid_out(whole, np.random.default_rng(seed))
    split = micro_batches(settings, fallen, dealt(fallen, ways))
    for batches in ([fallen], split):
        slope, found = gradient(settings, batches, whole.policy_logprobs)
        assert found == pytest.approx(units, rel=1e-10)
        torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-12)


ANY = {
    "seed": st.integers(0, 2**16),
    "ways": st.lists(st.integers(0, 3), min_size=7, max_size=7),
}


@pytest.mark.parametrize("name", PRESETS)
@run(max_examples=10, deadline=None, derandomize=True)
@for_any(**ANY)
def test_every_preset_is_blind_to_rows(name: str, seed: int, ways: list[int]) -> None:
    check(settings_of(name), seed, ways)


@run(max_examples=300, deadline=None, derandomize=True)
@for_any(chosen=st.sampled_from(COMBINED), **ANY)
def test_every_combination_of_parts_is_blind_to_rows(
    chosen: ObjectiveSettings, seed: int, ways: list[int]
) -> None:
    check(chosen, seed, ways)


def test_all_parts_are_among_the_combinations() -> None:
    for kind in ("ratio", "surrogate", "correction", "correction_level", "aggregation"):
        left = set(PARTS[kind]) - {getattr(one, kind) for one in COMBINED}
        assert left == set(), f"{kind} {left} is in no combination"


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_logged_is_blind_to_rows(name: str) -> None:
    settings = settings_of(name)
    whole = chained(made(3, rows=8))
    whole = replace(whole, entropy=whole.policy_logprobs.square())
    fallen, where = laid_out(whole, np.random.default_rng(3))
    logged = []
    for one in (whole, fallen):
        done = compute_loss(settings, one)
        entropy = -one.policy_logprobs.detach()
        found = diagnostic_sums(one, done, entropy, 4) | diagnostic_maxima(one, done, 4)
        logged.append({key: float(value) for key, value in found.items()})
    assert logged[1] == pytest.approx(logged[0], rel=1e-9, abs=1e-12)
    assert not torch.equal(where, torch.arange(len(whole)))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_on_policy_rloo_pulls_at_each_token_alike(rows: int) -> None:
    """Twenty tokens of one rollout, of advantage 1, in so many rows: 1 a token."""
    row = [i // (20 // rows) for i in range(20)]
    given = tokens([-1.0] * 20, row=row, turn=row, rollout=[0] * 20)
    done = compute_loss(preset("rloo"), given)
    (slope,) = torch.autograd.grad(done.total / done.units, given.policy_logprobs)
    assert slope.tolist() == pytest.approx([-1.0] * 20)


@pytest.mark.parametrize("rows", [1, 5])
def test_topr_tapers_a_failure_by_its_whole_ratio(rows: int) -> None:
    """Twenty tokens, pi/mu = exp(-.5) each; a graded reward of .6 below its group's mean."""
    row = [i // (20 // rows) for i in range(20)]
    given = tokens(
        *([-1.5] * 20, [-1.5] * 20, [-1.0] * 20, [-0.2] * 20),
        score=[0.6] * 20,
        row=row,
        turn=row,
        rollout=[0] * 20,
    )
    done = compute_loss(preset("topr"), given)
    (slope,) = torch.autograd.grad(done.total, given.policy_logprobs)
    assert slope.tolist() == pytest.approx([0.2 * np.exp(-10)] * 20)


# References: what each token's gradient is, of rollouts in any rows; loops over rollouts in NumPy.


def of_mixed(x: dict[str, Numbers], here: NDArray[np.bool_]) -> Numbers:
    """GSPO's ratio, the rollout's whole weight, an entropy H = (log pi)^2; a group a rollout."""
    s = np.exp((x["logp"] - x["old"])[here].mean())
    w = min(np.exp(np.clip((x["old"] - x["mu"])[here].sum(), -20, 20)), 2.0)
    advantage = x["advantage"][here]
    held = np.where(advantage > 0, s > 1.2, s < 0.8)
    return (-w * s * advantage * ~held - 0.1 * 2 * x["logp"][here]) / here.sum()


def of_topr(x: dict[str, Numbers], here: NDArray[np.bool_]) -> Numbers:
    ratio = np.exp((x["logp"] - x["mu"])[here].sum())
    advantage = x["advantage"][here]
    return -np.where(advantage > 0, 1.0, min(ratio, 1.0)) * advantage


def of_gspo(x: dict[str, Numbers], here: NDArray[np.bool_]) -> Numbers:
    s = np.exp((x["logp"] - x["old"])[here].mean())
    w = min(np.exp((x["old"] - x["mu"])[here].mean()), 2.0)
    advantage = x["advantage"][here]
    held = np.where(advantage > 0, s > 1.2, s < 0.8)
    return -w * s * advantage * ~held / here.sum()


def of_rloo(x: dict[str, Numbers], here: NDArray[np.bool_]) -> Numbers:
    ratio = np.exp((x["logp"] - x["old"])[here].sum())
    advantage = x["advantage"][here]
    held = np.where(advantage > 0, ratio > 1.2, ratio < 0.8)
    return -ratio * advantage * ~held


REFERENCES: dict[str, tuple[ObjectiveSettings, Callable[..., Numbers]]] = {
    "topr": (preset("topr"), of_topr),
    "gspo": (preset("gspo", clip_low=0.2, clip_high=0.2), of_gspo),
    "rloo": (preset("rloo", correction="none"), of_rloo),
    "mixed": (
        preset(
            "grpo",
            ratio="sequence",
            correction_level="sequence_product",
            aggregation="group_mean",
            entropy_coef=0.1,
        ),
        of_mixed,
    ),
}


def arrays(given: Tokens) -> dict[str, Numbers]:
    return {name: getattr(given, field).detach().numpy() for name, field in FIELDS.items()}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_those_of_the_papers(name: str, seed: int) -> None:
    """Of the product with one advantage a rollout, which is what its paper has."""
    settings, reference = REFERENCES[name]
    given = made(seed, rows=30, experts=False, spread=0.15)
    off = given.rollout_logprobs.clone()
    off[::40] -= 6.0  # single tokens 6 nats off, either way
    off[20::40] += 6.0
    given = replace(given, rollout_logprobs=off, entropy=given.policy_logprobs.square())
    if name == "rloo":
        drawn = np.random.default_rng(seed).normal(size=given.rollouts)
        given = replace(given, advantage=torch.from_numpy(drawn)[given.rollout])
    if name == "mixed":
        given = replace(given, group=given.rollout, group_sampled=given.rollout_sampled)
    x, expected = arrays(given), np.zeros(len(given))
    for number in range(given.rollouts):
        here = given.rollout.numpy() == number
        expected[here] = reference(x, here)
    slope, _ = gradient(settings, [given], given.policy_logprobs)
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-10, atol=1e-14)
    assert np.count_nonzero(expected) > 0


@pytest.mark.parametrize("seed", range(5))
def test_preferences_have_the_gradients_of_their_papers(seed: int) -> None:
    given = made(seed, rows=20)
    x, rollout, row = arrays(given), given.rollout.numpy(), given.row.numpy()
    label, pair = given.label.numpy()[row], given.pair.numpy()[row]
    gain, beta, z = x["logp"] - x["reference"], 0.1, float(given.kto_z or 0)
    dpo, kto = np.zeros(len(given)), np.zeros(len(given))
    for number in set(pair.tolist()) - {-1}:
        here = pair == number
        dpo[here] = -beta * label[here] / (1 + np.exp(beta * (label * gain)[here].sum()))
    for number in range(given.rollouts):
        here = rollout == number
        of = label[here][0]
        right = 1 / (1 + np.exp(-beta * of * (gain[here].sum() - z)))
        kto[here] = -beta * of * right * (1 - right)
    for name, expected, units in (("dpo", dpo, len(set(pair) - {-1})), ("kto", kto, None)):
        slope, found = gradient(preset(name), [given], given.policy_logprobs)
        np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-10, atol=1e-14)
        assert found == pytest.approx(given.rollouts if units is None else units)


@pytest.mark.parametrize("name", ["gspo", "rloo", "gigpo", "dr_grpo", "reinforce++"])
def test_an_experts_tokens_thin_out_nothing(name: str) -> None:
    """A prefix of nine of an expert's tokens before one that was sampled."""
    changes = {"aggregation": "turn_mean"} if name == "reinforce++" else {}
    settings = preset(name, **changes)
    long = tokens(
        *([-1.0] * 10,),
        turn=[0] * 9 + [1],
        row=[0] * 10,
        rollout=[0] * 10,
        demonstration=[True] * 9 + [False],
    )
    alone = tokens([-1.0], turn=[0])
    found = []
    for given in (long, alone):
        done = compute_loss(settings, given)
        found.append(
            float(torch.autograd.grad(done.total / done.units, given.policy_logprobs)[0][-1])
        )
    assert found[0] == pytest.approx(found[1])

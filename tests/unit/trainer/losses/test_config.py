"""The objective's settings: what is asked for, what does not fit, parts of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from support.trainer import own_parts
from support.trainer.loss_tokens import made, slopes, tokens
from tracegrad_trainer.losses import (
    PRESETS,
    ObjectiveSettings,
    RolloutRewards,
    compute_advantages,
    compute_loss,
    preset,
)
from tracegrad_trainer.losses.part_names import PARTS

HERE = own_parts.__name__


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


@pytest.mark.parametrize("field", PARTS)
def test_an_unknown_part_is_named_with_those_there_are(field: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field}\n.*unknown {field} 'xyz': use one of \w"):
        preset("grpo", **{field: "xyz"})


@pytest.mark.parametrize(
    ("name", "changes", "needs"),
    [
        ("grpo", {}, set()),
        ("grpo", {"kl": "k3"}, {"reference"}),
        ("ppo", {}, {"value"}),
        ("ppo", {"kl": "k1", "kl_coef": 0.1}, {"value", "reference"}),
        ("dpo", {}, {"reference"}),
        ("kto", {}, {"reference", "kto_z"}),
        ("sft", {}, set()),
    ],
)
def test_what_the_step_must_bring(name: str, changes: dict[str, Any], needs: set[str]) -> None:
    assert preset(name, **changes).needs == needs


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dpo", {"aggregation": "token_mean"}, "surrogate 'dpo' needs 'pair_mean'"),
        ("kto", {"aggregation": "pair_mean"}, "surrogate 'kto' needs 'label_mean'"),
        ("grpo", {"aggregation": "pair_mean"}, "use 'token_mean' with 'ppo'"),
        ("gspo", {"ratio": "token"}, "the bounds of preset 'gspo' are for 'sequence' or 'turn'"),
        ("ipa", {"ratio": "token"}, "surrogate 'ipa' needs 'turn'"),
        ("ppo", {"ratio": "sequence"}, "advantage 'gae' is one a token and needs 'token'"),
        ("minirl", {"correction": "tis"}, "would be corrected twice"),
        ("decoupled_ppo", {"correction": "mis"}, "would be corrected twice"),
        ("topr", {"correction": "tis"}, "would be corrected twice"),
        ("sft", {"correction": "tis"}, "use 'none', surrogate 'sft' samples nothing"),
        ("grpo", {"kl_coef": 0.1}, "kl_coef 0.1: choose an estimator"),
        ("grpo", {"kl_unbiased": True}, "kl_unbiased: choose an estimator"),
        ("dpo", {"kl": "k3"}, "'dpo' has the reference in it"),
        ("grpo", {"correction": "mis", "correction_floor": 2.0}, "must be below correction_cap"),
        ("dapo", {"overlong_budget": 9, "overlong_buffer": 10}, "must not exceed"),
        ("sft", {"whiten": True}, "has no advantages"),
        ("sft", {"advantage": "gae"}, "use 'dr_grpo'"),
        (
            "grpo",
            {"imitation": 0.1},
            "nothing in this objective uses it (it is of advantage 'ipa', surrogate 'ipa')",
        ),
        (
            "grpo",
            {"centre": True},
            "centre = True: nothing in this objective uses it (it is of adv",
        ),
        (
            "ppo",
            {"overlong_budget": 9},
            "overlong_budget = 9: nothing in this objective uses",
        ),
        ("grpo", {"overlong_buffer": 2}, "(it is of overlong_budget)"),
        ("grpo", {"options": {"tau": 1}}, "options: they are for parts of your own"),
        ("reinforce++", {"whiten": True}, "whiten = True: nothing in this objective uses it"),
        ("grpo", {"judge": "no_such_module:judge"}, "judge 'no_such_module:judge' cannot be"),
    ],
)
def test_what_does_not_go_together_is_one_clear_error(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        preset(name, **changes)
    (error,) = caught.value.errors()
    assert message in error["msg"]
    assert "\n" not in error["msg"]


@pytest.mark.parametrize("surrogate", ["topr", "decoupled_ppo", "minirl", "signed_prob_mask"])
def test_a_surrogate_with_mu_in_it_may_still_reject(surrogate: str) -> None:
    assert preset("grpo", surrogate=surrogate, correction="reject").correction == "reject"
    assert all(
        PRESETS[name]["correction"] == "none"
        for name in PRESETS
        if PRESETS[name]["surrogate"] == surrogate
    )


def test_what_is_of_rows_or_rollouts_says_so() -> None:
    assert {name for name in PRESETS if preset(name).needs_paths} == {"kto"}
    wanting = {name for name in PRESETS if preset(name).sums_rollouts}
    assert wanting == {"gspo", "topr", "rloo", "kto"}
    assert preset("grpo", correction_level="sequence").sums_rollouts
    assert preset("grpo", ratio=f"{HERE}:own_ratio").sums_rollouts
    assert not preset("grpo", advantage=f"{HERE}:own_advantage").sums_rollouts


def test_parts_of_ones_own_are_import_paths() -> None:
    settings = preset(
        "grpo",
        advantage=f"{HERE}:own_advantage",
        ratio=f"{HERE}:own_ratio",
        surrogate=f"{HERE}:own_surrogate",
        correction=f"{HERE}:own_correction",
        correction_level=f"{HERE}:own_level",
        aggregation=f"{HERE}:own_aggregation",
        options={"times": 2.0},
    )
    given = tokens([-1.0, -1.0], old=[-1.5, -2.0], mu=[1.0, 3.0])
    done = compute_loss(settings, given)
    assert done.total.item() == pytest.approx(-(1.0 + 2.0) * 2.0 * 3.0)
    assert done.units.item() == 7
    assert slopes(done.total, given) == pytest.approx([-12.0, -12.0])
    assert [list(v) for v in compute_advantages(settings, [rollout()], {})] == [[4.0, 4.0]]


def rollout() -> RolloutRewards:
    return RolloutRewards(
        rollout_id="r1",
        task="t",
        agent="",
        group=0,
        reward=2.0,
        turn_rewards=np.zeros(2),
        tokens=np.ones(2, np.int64),
        parents=np.array([-1, 0]),
        states=[b"", b"a"],
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:part", "cannot be imported: No module named 'no_such_module'"),
        (f"{HERE}:missing", "cannot be imported: module .* has no attribute 'missing'"),
        (f"{HERE}:NOTHING", "is a int, not a function"),
    ],
)
@pytest.mark.parametrize("field", PARTS)
def test_a_path_that_leads_nowhere_is_named_at_once(field: str, path: str, message: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field}\n.*{field} '{path}' {message}"):
        preset("grpo", **{field: path})


@pytest.mark.parametrize(
    ("field", "part", "message"),
    [
        (
            "ratio",
            "a_scalar",
            r"must return a float tensor, shape \(n,\), not a tensor of shape \(\)",
        ),
        ("ratio", "whole_numbers", "must return a float tensor, not torch.int64"),
        ("surrogate", "alone", r"must return \(numbers \[n\], bool\[n\]\), not a tensor of shape"),
        ("surrogate", "no_truths", "must return bool as its second value"),
        ("correction", "alone", r"must return \(numbers \[n\], bool\[n\]\)"),
        ("correction_level", "a_scalar", r"must return a float tensor, shape \(n,\)"),
        ("aggregation", "alone", r"must return \(shares \[n\], units\), not a tensor"),
        ("aggregation", "no_truths", "must return a float tensor, a scalar, not a tensor of shape"),
    ],
)
def test_what_a_part_returns_is_looked_at(field: str, part: str, message: str) -> None:
    given = made(0)
    settings = preset("grpo", **{field: f"{HERE}:{part}"})
    message = message.replace("(n,", f"({len(given)},")
    with pytest.raises(ValueError, match=f"{field} '{HERE}:{part}' {message}"):
        compute_loss(settings, given)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("one_rollout_too_few", r"must return one array a rollout \(1\)"),
        ("one_turn_too_many", r"returned shape \(3,\) for the 2 turns of rollout r1"),
        ("not_a_number", "of rollout r1 is not finite"),
        ("a_scalar", r"must return one array a rollout \(1\)"),
    ],
)
def test_what_an_advantage_returns_is_looked_at(part: str, message: str) -> None:
    settings = preset("grpo", advantage=f"{HERE}:{part}", options={"times": 1.0})
    with pytest.raises(ValueError, match=f"advantage '{HERE}:{part}' {message}"):
        compute_advantages(settings, [rollout()], {})

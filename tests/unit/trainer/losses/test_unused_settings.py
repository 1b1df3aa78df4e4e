"""The table of settings by parts, proven by doing: changed, a setting changes what a step does, or
it is refused with its name; and what is refused changes nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from support.trainer import own_parts
from support.trainer.loss_tokens import made, tokens
from tracegrad_trainer.losses import (
    PRESETS,
    ObjectiveSettings,
    RolloutRewards,
    Tokens,
    compute_advantages,
    compute_loss,
    preset,
)
from tracegrad_trainer.losses.config import drop_unused
from tracegrad_trainer.losses.gae import first_of_turns, gae, gae_of_turns
from tracegrad_trainer.losses.part_names import CHOICES, PARTS, WHERE_SET

# Of each setting values of which no preset has both, and one changes something where it is read.
VALUES: dict[str, tuple[Any, ...]] = {
    "options": ({"tau": 1.0},),
    "gamma": (0.5,),
    "gae_lambda": (0.3,),
    "gae_level": ("turn",),
    "deciding_turn": ("last",),
    "entropy_coef": (0.3,),
    "entropy_target": (0.7,),
    "entropy_rate": (0.9,),
    "turn_weight": (3.0,),
    "running_decay": (0.5,),
    "centre": (True,),
    "clip_low": (0.03, 0.95),
    "clip_high": (0.03, 9.0),
    "dual_clip": (1.01,),
    "prox": ("interpolated",),
    "prox_weight": (0.1,),
    "over_cap": ("clamp",),
    "mask_low": (0.97,),
    "mask_high": (1.03,),
    "prob_bound": (0.01,),
    "prob_penalty": (0.5,),
    "imitation": (0.7,),
    "reinforcement": (0.3,),
    "beta": (0.7,),
    "correction_cap": (1.1,),
    "correction_floor": (0.9,),
    "reject_stat": ("k2",),
    "kl": ("k3",),
    "kl_coef": (0.3,),
    "kl_unbiased": (True,),
    "constant": (7.0,),
    "value_coef": (0.1,),
    "value_clip": (0.01,),
    "whiten": (True,),
    "overlong_budget": (10,),
    "overlong_buffer": (5,),
    "overlong_penalty": (9.0,),
    **{kind: tuple(names) for kind, names in PARTS.items()},
}
JUDGE = f"{own_parts.__name__}:longest"


def batch() -> tuple[list[RolloutRewards], Tokens]:
    """Rollouts in groups of two and their tokens: with turn rewards, an expert's turn, states that
    are met twice, ratios and mismatches on all sides of every bound."""
    whole = made(11, rows=60, spread=1.2)
    rng = np.random.default_rng(0)
    rollouts = []
    turn, rollout = whole.turn.numpy(), whole.rollout.numpy()
    for number in range(whole.rollouts):
        own = np.unique(turn[rollout == number])
        sizes = np.array([(turn == t).sum() for t in own])
        rollouts.append(
            RolloutRewards(
                rollout_id=str(number),
                task=f"t{number // 2}",
                agent="",
                group=number // 2,
                reward=2 + float(rng.integers(0, 4)) + number % 2,
                turn_rewards=rng.normal(size=len(own)) ** 2,
                tokens=sizes,
                parents=np.arange(len(own)) - 1,
                states=[bytes([k % 2]) for k in range(len(own))],
                deciding_turn=0,
            )
        )
    entropy = torch.from_numpy(rng.uniform(0.1, 2.0, len(whole)))
    return rollouts, replace(whole, entropy=entropy)


ROLLOUTS, WHOLE = batch()


def outcome(settings: ObjectiveSettings) -> list[Tensor]:
    """Loss, gradients and masks of a step, as prepass and step would put it together."""
    given = WHOLE
    # A running mean that is known already, and rewards of an agent that was seen.
    memory = {"running": {"tasks": {"t0": 0.3}, "agents": {"": 0.7}}}
    found = compute_advantages(settings, ROLLOUTS, memory)
    memory_after = [float(x) for kind in memory["running"].values() for x in kind.values()]
    advantage = torch.from_numpy(np.concatenate(found))[_turn_of_token()]
    value = given.value
    assert value is not None
    changes: dict[str, Any] = {"advantage": advantage}
    if "value" in settings.needs and settings.gae_level == "turn":
        changes = _valued_by_turn(settings)
    elif "value" in settings.needs:
        a, r = gae(
            value.detach(),
            given.rollout_logprobs,
            given.rollout,
            gamma=settings.gamma,
            lam=settings.gae_lambda,
        )
        changes = {"advantage": a, "returns": r}
    if settings.whitens:
        a = changes["advantage"]
        changes["advantage"] = torch.where(given.sampled, (a - a.mean()) / a.std(), a)
    done = compute_loss(settings, replace(given, **changes))
    slopes = torch.autograd.grad(
        done.total + 0 * (given.policy_logprobs.sum() + value.sum()), [given.policy_logprobs, value]
    )
    read = settings.surrogate not in ("sft", "dpo", "kto")
    after = torch.tensor(memory_after if read and settings.advantage == "running" else [0.0])
    coef = torch.tensor(settings.next_entropy_coef(settings.entropy_coef, 0.4))
    return [done.total.detach(), done.units, *slopes, done.masked, done.clipped, after, coef]


def _valued_by_turn(settings: ObjectiveSettings) -> dict[str, Any]:
    assert WHOLE.value is not None
    first = first_of_turns(WHOLE.turn, WHOLE.turns)
    found = gae_of_turns(
        WHOLE.value.detach()[first].numpy(),
        WHOLE.rollout_logprobs[first].numpy(),
        WHOLE.rollout[first].numpy(),
        WHOLE.turn[first].numpy(),
        gamma=settings.gamma,
        lam=settings.gae_lambda,
    )
    a, r = (torch.from_numpy(each)[WHOLE.turn] for each in found)
    return {"advantage": a, "returns": r}


def _turn_of_token() -> Tensor:
    """Turns numbered rollout by rollout, as the advantages stand."""
    turn, rollout = WHOLE.turn.numpy(), WHOLE.rollout.numpy()
    order = np.concatenate([np.unique(turn[rollout == r]) for r in range(WHOLE.rollouts)])
    return torch.from_numpy(np.argsort(order)[turn])


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-9, atol=1e-12)
        for x, y in zip(a, b, strict=True)
    )


def usual(name: str) -> ObjectiveSettings:
    """The preset; DAPO with a budget that is met by rollouts as short as these."""
    short = {"overlong_budget": 14, "overlong_buffer": 9} if name == "dapo" else {}
    return preset(name, **short)


def test_every_setting_is_tried_and_read_by_something() -> None:
    fields = set(ObjectiveSettings.model_fields) - {"preset", "judge"}
    assert fields == set(VALUES)
    read = {
        field
        for values in (*PARTS.values(), *CHOICES.values())
        for reads in values.values()
        for field in reads
    }
    read |= {field for reads in WHERE_SET.values() for field in reads}
    assert fields | {"judge"} == read | {"options", "surrogate"}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("field", VALUES)
def test_a_setting_changes_something_or_is_refused_by_name(name: str, field: str) -> None:
    given, before = usual(name), outcome(usual(name))
    changed: list[bool] = []
    for value in VALUES[field]:
        if value == getattr(given, field):
            continue
        try:
            found = ObjectiveSettings.model_validate(given.model_dump() | {field: value})
        except ValidationError as error:
            (said,) = error.errors()
            if said["msg"].startswith(f"Value error, {field} ="):
                assert "nothing in this objective uses it" in said["msg"]
                unchecked = given.model_copy(update={field: value})
                assert same(outcome(unchecked), before), f"{field} = {value!r} would be used"
            else:  # does not go together with the rest
                assert field in said["msg"] or field in PARTS
            continue
        watched = "reference" in found.needs - given.needs
        changed.append(watched or not same(outcome(found), before))
        assert changed[-1] or field not in PARTS, f"{field} = {value!r} does nothing"
    assert not changed or any(changed), f"{field} does nothing"


def test_a_dump_of_any_settings_is_valid_again() -> None:
    for name in PRESETS:
        for field, values in VALUES.items():
            for value in values:
                try:
                    found = preset(name, **{field: value})
                except ValidationError:
                    continue
                assert ObjectiveSettings.model_validate(found.model_dump()) == found
                assert ObjectiveSettings.model_validate_json(found.model_dump_json()) == found


def test_what_earlier_versions_recorded_can_be_read_without_what_was_ignored() -> None:
    old = preset("ppo").model_dump() | {"overlong_budget": 9, "clip_low": 0.1, "beta": 0.3}
    with pytest.raises(ValidationError, match=r"beta = 0\.3: nothing in this objective uses it"):
        ObjectiveSettings.model_validate(old)
    assert ObjectiveSettings.model_validate(drop_unused(old)) == preset("ppo", clip_low=0.1)


def test_what_was_recorded_under_earlier_names_is_read() -> None:
    dapo = preset("dapo", overlong_buffer=7).model_dump()
    old = {name.replace("overlong_", "over_length_"): value for name, value in dapo.items()}
    old["over_length_part"] = old.pop("over_length_buffer")
    with pytest.raises(ValidationError, match="over_length_part"):
        ObjectiveSettings.model_validate(old)
    assert ObjectiveSettings.model_validate(drop_unused(old)).model_dump() == dapo


@pytest.mark.parametrize("field", ["preset", "surrogate", "advantage"])
def test_a_name_of_another_version_is_left_for_validation_to_refuse(field: str) -> None:
    old = preset("grpo").model_dump() | {field: "of_later"}
    with pytest.raises(ValidationError, match=r"unknown .*'of_later': use one of"):
        ObjectiveSettings.model_validate(drop_unused(old))


def test_the_judge_is_read_where_rewards_are() -> None:
    assert preset("ppo", judge=JUDGE).judge == JUDGE
    with pytest.raises(ValidationError, match=r"judge = .*it is of advantage 'dr_grpo'"):
        preset("dpo", judge=JUDGE)


def test_a_part_of_ones_own_may_read_anything_unless_it_says_what() -> None:
    own = {"surrogate": f"{own_parts.__name__}:quiet"}
    assert preset("grpo", **own, beta=0.5, imitation=0.3).beta == 0.5
    said = {"surrogate": f"{own_parts.__name__}:telling", "options": {"a": 1}}
    assert preset("grpo", **said, beta=0.5).beta == 0.5
    with pytest.raises(
        ValidationError, match=r"imitation = 0\.3: nothing in this objective uses it"
    ):
        preset("grpo", **said, imitation=0.3)
    assert compute_loss(preset("grpo", **said), tokens([-1.0])).units == 1


def test_a_judge_needs_no_settings() -> None:
    assert own_parts.longest(SimpleNamespace(rollouts=[[1], [1, 2]])) == [1.0, 2.0]

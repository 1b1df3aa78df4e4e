"""Every preset builds, evaluates, differentiates, and does not care how a step was split."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given as for_any
from hypothesis import settings as run
from hypothesis import strategies as st
from torch import Tensor

from support.trainer.loss_tokens import dealt, made, micro_batches, tokens
from tracegrad_trainer.losses import PRESETS, ObjectiveSettings, Tokens, compute_loss, preset
from tracegrad_trainer.losses.diagnostics import (
    diagnostic_maxima,
    diagnostic_sums,
    summarise_diagnostics,
)
from tracegrad_trainer.losses.part_names import PARTS

WANTED = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "topr",
    "ppo",
    "decoupled_ppo",
    "rloo",
    "reinforce++",
    "opo",
    "gigpo",
    "minirl",
    "tis",
    "ipa",
    "sft",
    "dpo",
    "kto",
]


def settings_of(name: str) -> ObjectiveSettings:
    """The preset, with a reference to keep to where it may have one."""
    return preset(name) if name in ("dpo", "kto") else preset(name, kl="k3", kl_coef=0.1)


def numbers(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def entropies(given: Tokens) -> Tensor:
    return -given.policy_logprobs.detach()


def test_all_presets_are_there_and_print_all_they_choose() -> None:
    assert set(WANTED) <= set(PRESETS)
    for name, chosen in PRESETS.items():
        shown = preset(name).model_dump()
        assert {field: shown[field] for field in chosen} == chosen
        assert all(shown[part] for part in PARTS)
        assert ObjectiveSettings.model_validate(shown) == preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_evaluates_and_differentiates(name: str) -> None:
    given = made(0)
    done = compute_loss(settings_of(name), given)
    done.total.backward()
    assert done.total.isfinite()
    assert done.units > 0
    assert given.policy_logprobs.grad is not None
    assert given.policy_logprobs.grad.isfinite().all()
    assert (given.policy_logprobs.grad[given.sampled] != 0).sum() > 0
    metrics = summarise_diagnostics(
        numbers(diagnostic_sums(given, done, entropies(given), 4)),
        numbers(diagnostic_maxima(given, done, 4)),
    )
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize("name", PRESETS)
def test_only_ipa_sft_and_preferences_learn_from_an_expert(name: str) -> None:
    given = made(0)
    compute_loss(settings_of(name), given).total.backward()
    assert given.policy_logprobs.grad is not None
    learnt = bool((given.policy_logprobs.grad[given.demonstration] != 0).any())
    assert learnt == (name in ("ipa", "sft", "dpo", "kto"))


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("sft", "dpo", "kto")])
def test_what_stands_for_an_experts_mu_changes_nothing(name: str) -> None:
    given = made(0)
    moved = replace(
        given, rollout_logprobs=torch.where(given.demonstration, -37.0, given.rollout_logprobs)
    )
    found = []
    for each in (given, moved):
        done = compute_loss(settings_of(name), each)
        (gradient,) = torch.autograd.grad(done.total, each.policy_logprobs)
        found.append(
            numbers(
                diagnostic_sums(each, done, entropies(each), 4) | diagnostic_maxima(each, done, 4)
            )
            | {"gradient": gradient.abs().sum().item(), "first": gradient[0].item()}
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("name", PRESETS)
@run(max_examples=8, deadline=None, derandomize=True)
@for_any(seed=st.integers(0, 2**16), ways=st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_a_micro_batch_split_changes_nothing(name: str, seed: int, ways: list[int]) -> None:
    settings = settings_of(name)
    whole = made(seed)
    done = compute_loss(settings, whole)
    (expected,) = torch.autograd.grad(done.total, whole.policy_logprobs)
    total = numbers(diagnostic_sums(whole, done, entropies(whole), 4))
    largest = numbers(diagnostic_maxima(whole, done, 4))

    found: dict[str, float] = {}
    highest: dict[str, float] = {}
    gradient = torch.zeros_like(expected)
    for one in micro_batches(settings, whole, dealt(whole, ways)):
        partly = compute_loss(settings, one)
        gradient += torch.autograd.grad(partly.total, whole.policy_logprobs)[0]
        for key, value in numbers(diagnostic_sums(one, partly, entropies(one), 4)).items():
            found[key] = found.get(key, 0.0) + value
        for key, value in numbers(diagnostic_maxima(one, partly, 4)).items():
            highest[key] = max(highest.get(key, 0.0), value)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    assert found == pytest.approx(total, rel=1e-10, abs=1e-10)
    assert highest == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_a_micro_batch_without_targets_is_nothing(name: str) -> None:
    none = tokens([], reference=[], value=[], old_value=[], returns=[], kto_z=0.0)
    filling = replace(none, rows=1, pair=torch.tensor([-1]), label=torch.tensor([0]))
    done = compute_loss(settings_of(name), filling)
    done.total.backward()
    assert set(numbers(diagnostic_sums(filling, done, torch.zeros(0), 4)).values()) == {0.0}
    assert set(numbers(diagnostic_maxima(filling, done, 4)).values()) == {0.0}


@pytest.mark.parametrize("name", PRESETS)
def test_one_group_is_not_another(name: str) -> None:
    """Two copies of a rollout's rows in one micro-batch are twice the same: nothing is compared,
    averaged or normalised over what happens to be packed together.
    """
    settings = settings_of(name)
    whole = made(7, rows=6)
    alone = compute_loss(settings, whole)
    both = compute_loss(settings, doubled(whole))
    assert both.total.item() == pytest.approx(2 * alone.total.item())
    assert both.units.item() == pytest.approx(2 * alone.units.item())
    assert both.log_ratio.tolist() == pytest.approx(alone.log_ratio.tolist() * 2)


def doubled(given: Tokens) -> Tokens:
    """The tokens twice: every number of the second time is a new one."""
    twice = {
        name: torch.cat([getattr(given, name)] * 2)
        for name in (
            *("policy_logprobs", "old_logprobs", "rollout_logprobs", "advantage", "score"),
            *("version", "demonstration", "turn_tokens"),
            *("rollout_tokens", "rollout_sampled", "group_tokens", "group_sampled", "label"),
            *("reference_logprobs", "value", "old_value", "returns"),
        )
    }
    for name in ("turn", "row", "rollout", "group"):
        numbers, count = getattr(given, name), getattr(given, f"{name}s")
        twice[name] = torch.cat([numbers, numbers + count])
    pair = given.pair
    twice["pair"] = torch.cat([pair, torch.where(pair >= 0, pair + 100, pair)])
    counts = {f"{n}s": 2 * getattr(given, f"{n}s") for n in ("turn", "row", "rollout", "group")}
    return replace(given, **twice, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_single_precision_keeps_six_digits_whatever_the_split(name: str) -> None:
    settings = settings_of(name)
    whole = single(made(9, rows=40))
    done = compute_loss(settings, whole)
    (expected,) = torch.autograd.grad(done.total, whole.policy_logprobs)
    assert expected.dtype is torch.float32
    total = units = 0.0
    gradient = torch.zeros_like(expected)
    parts = dealt(whole, range(40))
    for one in micro_batches(settings, whole, parts):
        partly = compute_loss(settings, one)
        total, units = total + partly.total.item(), units + partly.units.item()
        gradient += torch.autograd.grad(partly.total, whole.policy_logprobs)[0]
    assert units == pytest.approx(done.units.item(), rel=1e-6)
    assert total == pytest.approx(done.total.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def single(given: Tokens) -> Tokens:
    """The tokens as a model in single precision has them."""
    changed = {
        field.name: value.detach().float()
        for field in fields(Tokens)
        if isinstance(value := getattr(given, field.name), Tensor) and value.is_floating_point()
    }
    changed["policy_logprobs"].requires_grad_()
    changed["value"].requires_grad_()
    return replace(given, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_no_host_waits_for_its_device(name: str) -> None:
    """Tensors that hold no numbers: nothing is read back, and nothing stands on another device."""
    given = made(0)
    changed = {
        field.name: torch.empty_like(value, device="meta")
        for field in fields(Tokens)
        if isinstance(value := getattr(given, field.name), Tensor)
    }
    changed["policy_logprobs"].requires_grad_()
    there = replace(given, **changed)  # type: ignore[arg-type]
    done = compute_loss(settings_of(name), there)
    done.total.backward()
    logged = diagnostic_sums(there, done, there.rollout_logprobs, 4) | diagnostic_maxima(
        there, done, 4
    )
    assert {value.device.type for value in logged.values()} == {"meta"}
    assert there.policy_logprobs.grad is not None
    assert there.policy_logprobs.grad.device.type == "meta"

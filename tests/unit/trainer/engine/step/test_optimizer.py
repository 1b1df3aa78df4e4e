"""The optimizer's settings, its schedule by optimizer steps, and what decays."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tracegrad_trainer.engine import OptimSettings
from tracegrad_trainer.engine.step.optimizer import (
    apply_share_of_step,
    clear_momentum,
    learning_rate,
    local_gradients,
    make_optimizer,
    squared_norm,
)


def rates(count: int, **settings: Any) -> list[float]:
    optim = OptimSettings(lr=2.0, **settings)
    return [learning_rate(optim, steps) for steps in range(count)]


def test_the_rate_stays_without_a_schedule() -> None:
    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(5, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_a_line_falls_from_the_warm_up_to_the_floor() -> None:
    found = rates(7, schedule="linear", decay_steps=4, lr_floor=0.2)
    assert found == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4, 0.4, 0.4])
    warm = rates(7, schedule="linear", warmup_steps=2, decay_steps=6, lr_floor=0.0)
    assert warm == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_a_cosine_falls_slowly_then_fast_then_slowly() -> None:
    found = rates(6, schedule="cosine", decay_steps=4, lr_floor=0.0)
    # (1 + cos(pi k / 4)) / 2 x 2
    assert found == pytest.approx([2.0, 1.7071067811865475, 1.0, 0.2928932188134524, 0.0, 0.0])
    floored = rates(5, schedule="cosine", decay_steps=4, lr_floor=0.5)
    assert floored[2] == pytest.approx(1.5)
    assert floored[4] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "linear"}, "optim.schedule = 'linear' needs optim.decay_steps"),
        ({"decay_steps": 9}, "optim.decay_steps needs a schedule that decays"),
        (
            {"schedule": "cosine", "decay_steps": 5, "warmup_steps": 5},
            "optim.decay_steps = 5 must be more than optim.warmup_steps = 5",
        ),
        ({"betas": (0.9, 1.0)}, "optim.betas = (0.9, 1.0): each must be"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"schedule": "exponential"}, "schedule"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OptimSettings(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_without_momentum_a_step_is_the_new_gradients_alone(moments: Any) -> None:
    """AdamW of beta 0.5 and equal sizes of gradients moves by half a rate, whatever was before."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optim = OptimSettings(lr=0.5, betas=(0.5, 0.5), eps=1e-12, weight_decay=0.0, moments=moments)
    optimizer = make_optimizer(model, optim)
    for _ in range(20):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    before = model.weight.item()
    clear_momentum(optimizer)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert model.weight.item() == before, "nothing goes on by itself"
    for _ in range(20):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    before = model.weight.item()
    clear_momentum(optimizer)
    model.weight.grad = -torch.ones_like(model.weight)
    optimizer.step()
    assert model.weight.item() - before == pytest.approx(0.25, rel=1e-2)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model[0].weight.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimSettings(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name]), name


def test_what_is_frozen_is_not_the_optimizers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, OptimSettings())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == 1
    assert held[0] is model[1].weight


def test_one_kernel_for_a_whole_update_is_as_exact_as_one_for_each_product() -> None:
    """Ten updates of both against float64; torch's fused kernel takes a fourth of the time."""
    ends: dict[str, torch.Tensor] = {}
    for how, dtype in (("fused", torch.float32), ("foreach", torch.float32), ("exact", None)):
        model = nn.Linear(40, 30, bias=False, dtype=dtype or torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 1200).view(30, 40))
        implementation: Any = "foreach" if how == "exact" else how
        optimizer = make_optimizer(model, OptimSettings(lr=RATE, weight_decay=0.1), implementation)
        assert optimizer.defaults[implementation]
        for number in range(10):
            gradient = torch.randn(30, 40, generator=torch.Generator().manual_seed(number))
            model.weight.grad = gradient.to(model.weight.dtype)
            apply_share_of_step(optimizer, 0.5 if number == 3 else 1.0)
        ends[how] = model.weight.detach().double()
    for how in ("fused", "foreach"):
        error = (ends[how] - ends["exact"]).abs().max()
        assert error < 10 * torch.finfo(torch.float32).eps, how
    assert make_optimizer(nn.Linear(2, 2), OptimSettings()).defaults["fused"]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_an_optimizer_begins_as_torch_s_own_would(implementation: Any, share: float) -> None:
    """Its state is there before a first step; what that makes of it is torch's, bit by bit."""
    ends = []
    for lazy in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(40, 30)
        optimizer = make_optimizer(model, OptimSettings(lr=RATE, weight_decay=0.1), implementation)
        if lazy:
            optimizer.state.clear()
        else:
            assert {len(state) for state in optimizer.state.values()} == {3}
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            apply_share_of_step(optimizer, share)
        states = [optimizer.state[p] for p in model.parameters()]
        ends.append([*model.parameters(), *(state[name] for state in states for name in state)])
        assert [list(state) for state in states] == [["step", "exp_avg", "exp_avg_sq"]] * 2
    for found, own in zip(*ends, strict=True):
        assert (found.dtype, found.device) == (own.dtype, own.device)
        assert torch.equal(found, own)


class Float32Sizes(TorchDispatchMode):
    """Of what operations return in float32: the most elements."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.most = max(self.most, out.numel())
        return out


def test_moments_in_bfloat16_are_loaded_without_a_copy_in_float32() -> None:
    """All of them would be there at once: a run that fits could not be resumed."""
    model = nn.Linear(40, 30)
    optimizer = make_optimizer(model, OptimSettings(lr=RATE, moments="bfloat16"))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = make_optimizer(model, OptimSettings(lr=RATE, moments="bfloat16"))
    with Float32Sizes() as seen:
        other.load_state_dict(saved)
    assert seen.most <= 1, "steps"
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(other.state[parameter][name], value)
            assert other.state[parameter][name].dtype == value.dtype


def second_moment(moments: str, *, share: float, betas: tuple[float, float]) -> float:
    """Its mean after as many whole steps as make the first gradients a hundredth of it, gradients
    ten times as small as they were before."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = make_optimizer(model, OptimSettings(lr=RATE, betas=betas, moments=moments))
    drawn = torch.Generator().manual_seed(0)
    steps = int(4.6 / -math.log(betas[1]) / share)
    for size in (1.0, 0.1):
        for _ in range(steps):
            model.weight.grad = size * torch.randn(64, 64, generator=drawn)
            apply_share_of_step(optimizer, share)
    return float(optimizer.state[model.weight]["exp_avg_sq"].float().mean())


@pytest.mark.parametrize(
    ("share", "betas"), [(1.0, (0.9, 0.95)), (1 / 32, (0.9, 0.95)), (1.0, (0.9, 0.999))]
)
def test_moments_in_bfloat16_decay_however_little_a_step_asks_for(
    share: float, betas: tuple[float, float]
) -> None:
    """To the nearest they would stay many times too large."""
    exact = second_moment("float32", share=share, betas=betas)
    assert second_moment("bfloat16", share=share, betas=betas) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_moments_in_bfloat16_are_those_of_float32_rounded(implementation: Any) -> None:
    """Each to one of its two neighbours, from one update to the next; no bias is left."""
    model = nn.Linear(400, 300)
    optimizer = make_optimizer(model, OptimSettings(lr=RATE, moments="bfloat16"), implementation)
    twin = make_optimizer(model, OptimSettings(lr=RATE), implementation)
    for number in range(6):
        for parameter in model.parameters():
            drawn = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
        before = {p: p.detach().clone() for p in model.parameters()}
        apply_share_of_step(twin, 0.5 if number == 3 else 1.0)
        moved = {p: p.detach().clone() for p in model.parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(before[p])
        apply_share_of_step(optimizer, 0.5 if number == 3 else 1.0)
        for p in model.parameters():
            assert torch.equal(p, moved[p]), "the update is of float32"
            for name in ("exp_avg", "exp_avg_sq"):
                exact, kept = twin.state[p][name], optimizer.state[p][name]
                assert kept.dtype == torch.bfloat16
                off = (kept.double() - exact.double()) / exact.double()
                assert float(off.abs().max()) <= 2**-7
                assert abs(float(off.mean())) < 4 * 2**-8 / off.numel() ** 0.5
                exact.copy_(kept)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.5}
    # In float32 they would be, and stay so: a run may go on with the other.
    optimizer.load_state_dict(twin.state_dict())
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("second", [0.95, 0.999])
def test_moments_in_bfloat16_lead_where_those_of_float32_do(second: float) -> None:
    """After 100 steps on noisy gradients: .3 % of the way apart, in no direction."""

    def moved(moments: Any) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(0)
        model = nn.Linear(200, 150, bias=False)
        optimizer = make_optimizer(
            model, OptimSettings(lr=RATE, betas=(0.9, second), moments=moments)
        )
        with torch.no_grad():
            start = model.weight.normal_(generator=drawn).clone()
        mean = 0.3 * torch.randn(150, 200, generator=drawn)
        for _ in range(100):
            model.weight.grad = mean + torch.randn(150, 200, generator=drawn)
            optimizer.step()
        return model.weight.detach() - start

    exact, found = moved("float32"), moved("bfloat16")
    off = found - exact
    assert 1e-3 < float(off.norm() / exact.norm()) < 6e-3
    assert abs(float(off.mean() / exact.abs().mean())) < 1e-4


@pytest.mark.parametrize("kind", ["8bit", "int8", "float8"])
def test_moments_of_8_bits_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"no moments in {kind}: .* set 'bfloat16'"):
        OptimSettings.model_validate({"moments": kind})


def test_the_norm_is_over_all_gradients_together() -> None:
    model = nn.Linear(2, 1)
    cpu = torch.device("cpu")
    assert squared_norm(local_gradients(model.parameters()), cpu) == 0
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert squared_norm(local_gradients(model.parameters()), cpu) == pytest.approx(25)
    model.bias.grad = torch.tensor([12.0])
    assert squared_norm(local_gradients(model.parameters()), cpu) == pytest.approx(169)


RATE = 0.1


def stepped(
    gradients: list[float], share: float = 1.0, *, before: int = 0
) -> tuple[torch.optim.AdamW, nn.Parameter]:
    """An optimizer after `before` whole steps on gradients of 1, and one of `share` on each of
    these."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(model, OptimSettings(lr=RATE))
    for gradient, part in [(1.0, 1.0)] * before + [(g, share) for g in gradients]:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.param_groups[0]["lr"] = RATE * part
        apply_share_of_step(optimizer, part)
    return optimizer, model.weight


@pytest.mark.parametrize("before", [0, 3])
def test_eight_eighths_of_a_step_are_one(before: int) -> None:
    """Of the same gradient; its moments then are those of a whole step, to float32's rounding."""
    eighths, by_eighths = stepped([2.0] * 8, 1 / 8, before=before)
    whole, at_once = stepped([2.0], before=before)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(
            eighths.state[by_eighths][name], whole.state[at_once][name], rtol=1e-5, atol=1e-6
        )
    assert eighths.param_groups[0]["betas"] == (0.9, 0.95), "nothing of it stays"
    assert by_eighths.item() == pytest.approx(at_once.item(), rel=0.05)


def test_a_gradient_of_an_eighth_of_a_step_moves_an_eighth_in_later_steps_too() -> None:
    """A rate alone would leave nine tenths of it, which the first moment hands on."""

    def moved(gradient: float, share: float) -> float:
        optimizer, weight = stepped([gradient], share, before=50)
        for _ in range(200):  # all that the first moment still has of it
            weight.grad = torch.ones_like(weight)
            optimizer.param_groups[0]["lr"] = RATE
            apply_share_of_step(optimizer, 1.0)
        return weight.item()

    # What a gradient does beyond one that is as all others are, in steps of the rate.
    whole = (moved(1.5, 1.0) - moved(1.0, 1.0)) / RATE
    eighth = (moved(1.5, 1 / 8) - moved(1.0, 1 / 8)) / RATE
    assert eighth / whole == pytest.approx(1 / 8, rel=0.15)


def test_smaller_gradients_move_adamw_as_far_as_large_ones() -> None:
    """Why a loss that counts the groups without a signal would not do: the step's size is the
    same once the second moment has followed."""
    _, small = stepped([1 / 8] * 40)
    _, large = stepped([1.0] * 40)
    assert small.item() == pytest.approx(large.item(), rel=1e-5)
    _, scaled = stepped([1 / 8] * 40, 1 / 8)
    assert scaled.item() == pytest.approx(large.item() / 8, rel=1e-3)


def test_a_whole_step_is_torch_s_own_to_the_last_bit() -> None:
    found, weight = stepped([0.3, -0.7, 0.1], 1.0)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    plain = make_optimizer(model, OptimSettings(lr=RATE))
    for gradient in (0.3, -0.7, 0.1):
        model.weight.grad = torch.full_like(model.weight, gradient)
        plain.step()
    assert torch.equal(weight, model.weight)
    assert torch.equal(found.state[weight]["step"], torch.tensor(3.0))

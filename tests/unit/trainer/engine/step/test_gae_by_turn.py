"""Credit by turn: by hand, against the definition, and whatever rows and ranks turns fall into."""

from __future__ import annotations

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
from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.layout_ranks import BUDGET, made
from support.trainer.loss_tokens import tokens
from support.trainer.row_samples import turn
from tracegrad.events import Turn
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.engine import train_batch
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.step.prepass import prepass
from tracegrad_trainer.losses import compute_loss, preset
from tracegrad_trainer.losses.gae import at_turn_starts, gae, gae_of_turns

TURNS, LENGTH, LAMBDA = 5, 200, 0.95


def of_turns(
    value: Any, reward: Any, rollout: Any, number: Any, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    advantage, returns = gae_of_turns(
        np.array(value, float),
        np.array(reward, float),
        np.array(rollout),
        np.array(number),
        gamma=gamma,
        lam=lam,
    )
    return advantage.tolist(), returns.tolist()


def test_a_turn_is_credited_with_lambda_to_its_distance() -> None:
    """A critic that says 0, and 1 at the end of five turns of 200 tokens: token by token next to
    nothing reaches the turn before the last."""
    tokens_ = TURNS * LENGTH
    zero, reward = torch.zeros(tokens_, dtype=torch.float64), torch.zeros(tokens_).double()
    reward[-1] = 1.0
    row = torch.zeros(tokens_, dtype=torch.int64)
    by_token, _ = gae(zero, reward, row, gamma=1.0, lam=LAMBDA)
    assert by_token[4 * LENGTH - 1].item() == pytest.approx(LAMBDA**LENGTH)  # 3.5e-5
    advantage, returns = of_turns([0] * 5, [0, 0, 0, 0, 1], [7] * 5, range(5), 1.0, LAMBDA)
    assert advantage == pytest.approx([LAMBDA**4, LAMBDA**3, LAMBDA**2, LAMBDA, 1])
    assert returns == advantage
    assert advantage[3] / by_token[4 * LENGTH - 1].item() > 2e4


def test_by_hand() -> None:
    """gamma lam = 1/4. Rollout 3, turns 0, 1, 3: delta 1/2 x 4 - 2, 1/4 x 6 - 4, 8 - 6; the last
    is two places behind. Rollout 1: 3 - 1. The turns stand in another order."""
    advantage, returns = of_turns(
        value=[6, 1, 4, 2],
        reward=[8, 3, 0, 0],
        rollout=[3, 1, 3, 3],
        number=[3, 0, 1, 0],
        gamma=0.5,
        lam=0.5,
    )
    second = 0.25 * 6 - 4 + 2 / 16
    assert advantage == pytest.approx([2, 2, second, 0.5 * 4 - 2 + second / 4])
    assert returns == pytest.approx([8, 3, second + 4, advantage[3] + 2])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.5, 1.0]))
def test_equals_the_definition(seed: int, lam: float, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(0, 12))
    rollout = rng.integers(0, 3, m)
    number = rng.permutation(20)[:m]
    value, reward = rng.normal(size=m), rng.normal(size=m)
    found, returns = of_turns(value, reward, rollout, number, gamma, lam)
    for k in range(m):
        later = sorted(
            (s for s in range(m) if rollout[s] == rollout[k] and number[s] >= number[k]),
            key=lambda s: number[s],
        )
        total = 0.0
        for i, s in enumerate(later):
            ahead = later[i + 1] if i + 1 < len(later) else None
            following = 0.0
            if ahead is not None:
                following = gamma ** (number[ahead] - number[s]) * value[ahead]
            delta = reward[s] + following - value[s]
            total += (gamma * lam) ** (number[s] - number[k]) * delta
        assert found[k] == pytest.approx(total, abs=1e-9)
        assert returns[k] == pytest.approx(total + value[k], abs=1e-9)


def chain(*, rendered_again: bool) -> list[Turn]:
    """Five turns, of which each continues the one before; or each has a prompt of its own."""
    made_: list[Turn] = []
    for i in range(TURNS):
        parent = None if rendered_again or not made_ else made_[-1]
        made_.append(turn(f"t{i}", [1 + i, 2], [3, 4 + i], parent=parent))
    return made_


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("rendered_again", [False, True])
@pytest.mark.parametrize("skip", [(), (4,), (1, 4), (2, 3, 4)])
def test_a_rollout_is_one_line_of_turns_whatever_rows_they_fall_into(
    folder: Path, one_rank: None, level: str, rendered_again: bool, skip: tuple[int, ...]
) -> None:
    """Its reward comes once, with its last trained turn; a skipped turn's goes to the trained one
    before it."""
    turns = chain(rendered_again=rendered_again)
    turns = [
        replace(each, untrainable="media") if i in skip else each for i, each in enumerate(turns)
    ]
    kept = [i for i in range(TURNS) if i not in skip]
    expected = {i: 1 + 0.25 * (i <= 2) for i in kept}
    rows = rewarded(turns, {2: 0.25})
    assert len(rows) == (len(kept) if rendered_again else 1)
    assert credited(folder, rows, level) == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_a_last_turn_that_is_not_finite_does_not_take_the_outcome_along(
    folder: Path, one_rank: None, level: str
) -> None:
    rows = rewarded(chain(rendered_again=True), {})
    broken = next(i for i, row in enumerate(rows) if row.turn_numbers == (4,))
    rows[broken].rollout_logprobs[-1] = -np.inf
    found = credited(
        folder, [row for row in rows if np.isfinite(row.rollout_logprobs).all()], level
    )
    assert found == pytest.approx(dict.fromkeys(range(4), 1.0))
    learner = layout_ranks.learner(folder, "by_turn" if level == "turn" else "ppo")
    assert train_batch(learner, rows, version=4, budget=20).dropped == (broken,)


def rewarded(turns: list[Turn], rewards: dict[int, float]) -> list[Row]:
    """Of a rollout that was rewarded with 1."""
    return selected([Task("g", [Rollout("r0", 1.0, turns, rewards)])]).rows


def credited(folder: Path, rows: list[Row], level: str, budget: int = 20) -> dict[int, float]:
    """By turn what follows from its first token on: returns where no value is known."""
    learner = layout_ranks.learner(folder, "by_turn")
    zero: Tensor = learner.model.value_head.weight  # type: ignore[union-attr,assignment]
    torch.nn.init.zeros_(zero)
    objective = preset("ppo", gae_level=level, whiten=False, gae_lambda=1.0)
    batches = pack(rows, ranks=1, budget=budget)[0]
    engine = learner.engine
    before = prepass(
        engine, objective, engine.inputs(batches), [TargetContext()] * len(batches), ()
    )
    found: dict[int, float] = {}
    for batch, known in zip(batches, before, strict=True):
        assert known.returns is not None
        for number, value in zip(batch.turn_number.tolist(), known.returns.tolist(), strict=True):
            found.setdefault(number, value)
    return found


def test_a_turn_has_the_value_of_its_first_token() -> None:
    value = torch.tensor([5.0, 1.0, 2.0, 7.0, 3.0], dtype=torch.float64, requires_grad=True)
    turn_ = torch.tensor([1, 0, 1, 2, 0])
    found = at_turn_starts(value, turn_, 3)
    assert found.tolist() == [5, 1, 5, 7, 1]
    found.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2, 2, 0, 1, 0]


def test_the_value_loss_is_of_turns() -> None:
    """0.5 (v - R)^2 of v = 1 and 4, R = 3 and 4, each weighed by its turn's tokens."""
    given_ = tokens(
        [-1.0] * 3,
        turn=[0, 0, 1],
        value=torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64, requires_grad=True),
        old_value=[1.0, 1.0, 4.0],
        returns=[3.0, 3.0, 4.0],
    )
    chosen = preset("ppo", gae_level="turn", value_coef=1.0, value_clip=None)
    done = compute_loss(chosen, given_)
    assert done.value.item() == pytest.approx(2 * 0.5 * 4)
    assert done.values is not None
    assert done.values.tolist() == [1, 1, 4]
    done.value.requires_grad_()
    assert given_.value is not None
    (slope,) = torch.autograd.grad(done.total, given_.value)
    assert slope.tolist() == pytest.approx([2 * (1 - 3), 0, 0])


def test_ratios_of_whole_turns_go_with_it() -> None:
    assert preset("ppo", gae_level="turn", ratio="turn").ratio == "turn"
    with pytest.raises(ValueError, match="or gae_level = 'turn'"):
        preset("ppo", ratio="turn")


def looked_at(folder: Path, budget: int) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Of every turn, by row and place, its value, advantage and return; all its tokens' alike."""
    learner = layout_ranks.learner(folder, "by_turn")
    objective = preset("ppo", gae_level="turn", whiten=False, gamma=0.9, gae_lambda=0.5)
    batches = pack(made("by_turn"), ranks=1, budget=budget)[0]
    engine = learner.engine
    before = prepass(
        engine, objective, engine.inputs(batches), [TargetContext()] * len(batches), ()
    )
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for batch, known in zip(batches, before, strict=True):
        columns = (known.old_value, known.advantage, known.returns)
        for i, key in enumerate(zip(batch.row, batch.turn_number, strict=True)):
            name = (int(batch.row_keys[key[0]]), int(key[1]))
            numbers = tuple(float(column[i]) for column in columns if column is not None)
            assert found.setdefault(name, numbers) == numbers  # type: ignore[arg-type]
    return found


def test_credit_crosses_rows_and_micro_batches(folder: Path, one_rank: None) -> None:
    rows = made("by_turn")
    found = looked_at(folder, BUDGET)
    assert len(found) == 24
    of_rollout: dict[str, list[tuple[int, float, tuple[int, int]]]] = {}
    for (key, number), (value, _, _) in found.items():
        place = number - (rows[key].turn_numbers or ())[0]
        row = rows[key]
        reward = float(row.reward[row.turn_index == place].sum()) + row.score * (number == 3)
        of_rollout.setdefault(rows[key].rollout_id, []).append((number, reward, (key, number)))
        assert value != 0
    for line in of_rollout.values():
        assert [number for number, _, _ in sorted(line)] == [0, 1, 2, 3]
        running = following = 0.0
        for _, reward, name in sorted(line, reverse=True):
            value, advantage, returns = found[name]
            running = reward + 0.9 * following - value + 0.45 * running
            following = value
            assert advantage == pytest.approx(running, rel=1e-4, abs=1e-5)
            assert returns == pytest.approx(running + value, rel=1e-4, abs=1e-5)
    for budget in (60, 1000):
        other = looked_at(folder, budget)
        for name, numbers in found.items():
            assert other[name] == pytest.approx(numbers, rel=1e-4, abs=1e-5)


def test_a_whole_tree_can_be_credited_by_turn(folder: Path, one_rank: None) -> None:
    """Branches share a row; token by token there is no next token to follow."""
    first = turn("a", [1, 2], [3, 4])
    branches = [turn("b", [5], [6, 7], parent=first), turn("c", [8], [9, 10], parent=first)]
    task = Task("g", [Rollout("r0", 1.0, [first, *branches])])
    learner = layout_ranks.learner(folder, "by_turn")
    zero: Tensor = learner.model.value_head.weight  # type: ignore[union-attr,assignment]
    torch.nn.init.zeros_(zero)
    objective = preset("ppo", gae_level="turn", whiten=False, gae_lambda=0.5)
    for layout in ("tree", "paths"):
        rows = selected([task], shared_prefix=layout).rows
        [batch] = pack(rows, ranks=1, budget=100)[0]
        engine = learner.engine
        [known] = prepass(engine, objective, engine.inputs([batch]), [TargetContext()], ())
        assert known.advantage is not None
        by_turn = dict(zip(batch.turn_number.tolist(), known.advantage.tolist(), strict=True))
        assert by_turn == pytest.approx({0: 0.25, 1: 0.5, 2: 1.0})

"""Several optimizer steps on one batch: against which policy, over which rows, what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.trainer import fsdp_ranks
from support.trainer.forward_checks import alone
from support.trainer.fsdp_ranks import VERSION
from support.trainer.layout_ranks import learner, made
from support.trainer.learners import weights
from support.trainer.loss_tokens import tokens
from support.trainer.row_samples import rows
from tracegrad_trainer.batches import Row, mini_batches, pack
from tracegrad_trainer.engine import (
    Learner,
    OptimSettings,
    train_batch,
)
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.step.accumulate import _given, not_finite
from tracegrad_trainer.engine.step.epochs import _wrong, prepare_batch
from tracegrad_trainer.sft.config import SftSettings

pytestmark = pytest.mark.usefixtures("one_rank")


def of(name: str, folder: Path, **optim: Any) -> Learner:
    return learner(folder, name, **({"minibatches": 2, "epochs": 2} | optim))


def plain_loop(folder: Path, everything: list[Row], *, lr: float, clip: float) -> dict[str, Tensor]:
    """The clipped surrogate with a truncated token weight, the parts of two passes one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)
    with torch.no_grad():
        old = [alone(model, row).float() for row in everything]
    for part in mini_batches(everything, 2, seed="0 step 0") * 2:
        total, count = torch.zeros(()), 0
        for number in part:
            row = everything[number]
            ratio = (alone(model, row).float() - old[number]).exp()
            advantage = torch.from_numpy(row.advantage[row.keep])
            total -= torch.minimum(
                ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
            ).sum()
            count += len(ratio)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return dict(model.named_parameters())


def test_they_are_those_of_a_plain_loop(folder: Path) -> None:
    everything = rows(10)
    one = fsdp_ranks.learner(
        folder / "model", lr=5e-3, minibatches=2, epochs=2, max_grad_norm=float("inf")
    )
    one.objective = one.objective.model_copy(update={"correction": "none"})
    done = train_batch(one, everything, version=VERSION, budget=100)
    expected = plain_loop(folder, everything, lr=5e-3, clip=0.2)
    begun = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
    unclipped = plain_loop(folder, everything, lr=5e-3, clip=1e9)
    for name, tensor in weights(one).items():
        moved = (expected[name] - begun[name]).norm()
        assert (tensor - expected[name]).norm() < 1e-2 * moved, name
        assert (tensor - unclipped[name]).norm() > 3e-2 * moved, name
    assert (done.metrics["updates"], done.metrics["updates_skipped"]) == (4, 0)
    assert one.steps == 4
    assert done.metrics["clipped_share"] > 0.01
    assert done.metrics["ratio_max"] > 1.2
    assert done.metrics["turns_trained"] == 2 * sum(len(row.kept_turn_ids) for row in everything)


def test_the_first_of_them_is_the_step_it_would_be_alone(folder: Path) -> None:
    """Of one part and one pass there is no more than before; of more, the first is the same."""
    alone, more = of("grpo", folder, minibatches=1, epochs=1), of("grpo", folder)
    everything = made("grpo")
    [first, _] = mini_batches(everything, 2, seed="0 step 0")
    part = pack([everything[i] for i in first], ranks=1, budget=100, keys=first)[0]
    expected = alone.update(part, version=VERSION)
    start = prepare_batch(more, part)
    found = more.update(start.micro_batches, version=VERSION, before=start.before)
    assert found == expected


def test_learning_rates_go_by_optimizer_steps(folder: Path) -> None:
    one = of("grpo", folder, schedule="linear", decay_steps=8, lr=1.0, lr_floor=0.0)
    seen: list[float] = []
    step = one.optimizer.step

    def spy() -> None:
        seen.append(one.optimizer.param_groups[0]["lr"])
        step()

    one.optimizer.step = spy  # type: ignore[method-assign,assignment]
    done = train_batch(one, made("grpo"), version=VERSION, budget=100)
    assert seen == pytest.approx([1.0, 7 / 8, 6 / 8, 5 / 8])
    assert done.metrics["lr"] == pytest.approx(5 / 8)


def test_values_and_their_advantages_stay_those_of_the_batchs_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, seen = of("ppo", folder), []
    update = one.update
    monkeypatch.setattr(one, "update", lambda *a, **k: seen.append(k["before"]) or update(*a, **k))
    everything = made("ppo")
    at_start = prepare_batch(of("ppo", folder), pack(everything, ranks=1, budget=1000)[0])
    assert train_batch(one, everything, version=VERSION, budget=1000).applied
    for name in ("old_logprobs", "old_value", "returns", "advantage", "reference_logprobs"):
        [whole] = [getattr(known, name) for known in at_start.before]
        parts = [[getattr(known, name) for known in update] for update in seen]
        if whole is None:
            assert parts == [[None]] * 4
            continue
        torch.testing.assert_close(parts[0], parts[2])
        torch.testing.assert_close(parts[1], parts[3])
        together = torch.cat([*parts[0], *parts[1]]).sort().values
        torch.testing.assert_close(together, whole.sort().values, rtol=1e-4, atol=1e-5)
    has_current = [[known.current_logprobs is not None for known in update] for update in seen]
    assert has_current == [[True], [False], [False], [False]], "the policy moves"


def test_advantages_are_whitened_over_the_whole_batch(folder: Path) -> None:
    one = of("turn_mean", folder)
    everything = made("turn_mean")
    parts = mini_batches(everything, 2, seed="any")
    packed = [
        pack([everything[i] for i in part], ranks=1, budget=100, keys=part)[0] for part in parts
    ]
    start = prepare_batch(one, [batch for part in packed for batch in part])
    found = torch.cat([known.advantage for known in start.before if known.advantage is not None])
    assert float(found.mean()) == pytest.approx(0, abs=1e-5)
    assert float(found.std(unbiased=False)) == pytest.approx(1, abs=1e-4)
    half = torch.cat(
        [known.advantage for known in start.before[: len(packed[0])] if known.advantage is not None]
    )
    assert abs(float(half.mean())) > 1e-3


@pytest.mark.parametrize("name", ["old_logprobs", "reference_logprobs", "old_value"])
def test_a_target_is_wrong_where_any_of_its_numbers_is_not_finite(name: str) -> None:
    [batch] = pack(rows(1), ranks=1, budget=100)[0]
    finite = torch.zeros(len(batch.target))
    numbers = {"old_logprobs": finite, name: finite.index_fill(0, torch.tensor([1]), torch.nan)}
    assert _wrong(batch, TargetContext(**numbers)).nonzero().tolist() == [[1]]
    of_step = tokens([-1.0] * 3, reference=[-1.0] * 3, old_value=[0.0] * 3)
    bad = torch.tensor([0.0, torch.nan, 0.0], dtype=torch.float64)
    assert not_finite(_given(replace(of_step, **{name: bad}))).tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["turn_mean", "ppo"])
def test_a_row_that_is_not_finite_leaves_no_trace(folder: Path, name: str) -> None:
    everything = made(name)
    bad = list(everything)
    mu = bad[4].rollout_logprobs.copy()
    mu[bad[4].keep.argmax()] = -np.inf
    bad[4] = replace(bad[4], rollout_logprobs=mu)
    one, other = of(name, folder), of(name, folder)
    done = train_batch(one, bad, version=VERSION, budget=100)
    assert done.dropped == (4,)
    assert done.metrics["rows_dropped"] == 1
    # The same parts, but for the row.
    parts = [[i for i in part if i != 4] for part in mini_batches(bad, 2, seed="0 step 0")]
    packed = [
        pack([everything[i] for i in part], ranks=1, budget=100, keys=part)[0] for part in parts
    ]
    start = prepare_batch(other, [batch for part in packed for batch in part])
    for part in range(4):
        here = slice(0, len(packed[0])) if part % 2 == 0 else slice(len(packed[0]), None)
        other.update(start.micro_batches[here], version=VERSION, before=start.before[here])
    for key, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(other)[key], rtol=1e-4, atol=2e-5)


def test_an_update_without_finite_numbers_is_left_out_and_its_rows_are_named(
    folder: Path,
) -> None:
    """Finite log-probabilities, but a gradient that is not: of one part's advantages."""
    everything = made("grpo")
    _, second = mini_batches(everything, 2, seed="0 step 0")
    for i in second:
        huge = np.where(everything[i].keep, np.float32(3e38), np.float32(0))
        everything[i] = replace(everything[i], advantage=huge)
    one = of("grpo", folder)
    done = train_batch(one, everything, version=VERSION, budget=100)
    assert done.applied
    assert one.steps == 2
    assert done.dropped == tuple(second)
    assert (done.metrics["updates"], done.metrics["updates_skipped"]) == (2, 2)
    assert done.metrics["step_skipped"] == 0
    assert np.isfinite(done.metrics["grad_norm"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(one).values())


def test_a_batch_of_one_rollout_is_one_part(folder: Path) -> None:
    one = of("grpo", folder, epochs=1)
    done = train_batch(one, made("grpo")[:2], version=VERSION, budget=100)
    assert done.metrics["updates"] == 1
    assert done.metrics["policy_k3"] == 0


@pytest.mark.parametrize("name", ["minibatches", "epochs"])
def test_trainer_sft_has_its_own(folder: Path, name: str) -> None:
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    trainer = {
        "model": folder / "model",
        "objective": {"preset": "sft"},
        "optim": OptimSettings(**{name: 2}),  # type: ignore[arg-type]
    }
    with pytest.raises(ValueError, match=f"optim.{name} divides batches of rollouts: of trainer"):
        SftSettings(trainer=trainer)  # type: ignore[arg-type]

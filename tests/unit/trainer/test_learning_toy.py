"""The whole room on a toy: say an even number. Reward rises; with the controls it does not."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsdp_ranks
import numpy as np
import pytest
import torch
from learn_samples import Group, Sample, tiny_model, turn

from tracegrad_trainer.batches import BatchSettings, micro_batch, rows_of, select
from tracegrad_trainer.fsdp import FsdpSettings, Learner, start_ranks, stop_ranks, train_batch
from tracegrad_trainer.fsdp.forward import to_inputs
from tracegrad_trainer.objectives import advantages

TASKS, ROLLOUTS, STEPS = 8, 8, 12


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    start_ranks(FsdpSettings(device="cpu", threads=1))
    yield
    stop_ranks()


def act(learner: Learner, version: int) -> list[Group]:
    """Every task tried `ROLLOUTS` times: one token sampled after two that name the task."""
    asked = [turn("asked", [task, task + 20], [0]) for task in range(TASKS)]
    rows = [rows_of(Sample("", 0, [t]), group_id="", advantages=[0])[0] for t in asked]
    inputs = to_inputs(micro_batch(rows, range(TASKS)), learner.model, torch.device("cpu"))
    with torch.no_grad():
        mu = learner.model(**inputs.model).logits[0].log_softmax(-1)
    said = torch.multinomial(mu.exp(), ROLLOUTS, replacement=True)
    groups = []
    for task in range(TASKS):
        samples = []
        for number, token in enumerate(said[task].tolist()):
            one = turn(
                f"{version}.{task}.{number}",
                [task, task + 20],
                [token],
                version=version,
                completion_logprobs=array("f", [float(mu[task, token])]),
            )
            samples.append(Sample(one.turn_id, float(token % 2 == 0), [one]))
        groups.append(Group(str(task), samples))
    return groups


def rewards(groups: list[Group]) -> list[float]:
    return [sample.reward for group in groups for sample in group.rollouts]


def train(
    folder: Path, seed: int, *, lr: float = 2e-2, shuffled: bool = False
) -> tuple[float, float]:
    """Mean reward of the first and the last two batches."""
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    learner = fsdp_ranks.learner(tiny_model(folder, seed=seed), lr=lr, max_grad_norm=1.0)
    means = []
    for version in range(STEPS):
        groups = act(learner, version)
        means.append(float(np.mean(rewards(groups))))
        if shuffled:
            mixed = iter(order.permutation(rewards(groups)))
            for group in groups:
                for sample in group.rollouts:
                    sample.reward = next(mixed)
        selection = select(
            groups,
            BatchSettings(tokens_per_micro_batch=64),
            advantages=partial(advantages, learner.objective, memory={}),
            current_version=version,
        )
        if selection.rows:
            result = train_batch(learner, selection.rows, version=version, budget=64)
            assert result.applied
            assert result.metrics["gap_max"] < 1e-5
            assert result.metrics["turns_trained"] == len(selection.trained)
    return float(np.mean(means[:2])), float(np.mean(means[-2:]))


def test_reward_rises_on_three_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        before, after = train(tmp_path / str(seed), seed)
        assert before < 0.75
        assert after > 0.95


def test_without_a_learning_rate_it_does_not(tmp_path: Path) -> None:
    changes = [np.subtract(*train(tmp_path / str(seed), seed, lr=0.0)) for seed in range(3)]
    assert abs(np.mean(changes)) < 0.1


def test_with_shuffled_rewards_it_does_not(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(seed), seed, shuffled=True) for seed in range(3)]
    assert np.mean([after - before for before, after in runs]) < 0.2

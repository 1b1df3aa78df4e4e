"""All of a step on a toy: say an even number. Reward rises; with the controls it does not.

`losses/test_learning` has the same for objectives alone, on a table instead of a model.
"""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from support.trainer.learners import build
from support.trainer.row_samples import Group, Sample, tiny_model, turn
from tracegrad_trainer.batches import BatchSettings, TrainingSelection, micro_batch, rows_of, select
from tracegrad_trainer.batches.preferences import labelled_rows, mismatched_rows, preference_pairs
from tracegrad_trainer.engine import (
    Learner,
    train_batch,
)
from tracegrad_trainer.engine.model.forward import to_inputs
from tracegrad_trainer.losses import (
    PRESETS,
    AdvantageMemory,
    ObjectiveSettings,
    compute_advantages,
)

pytestmark = pytest.mark.usefixtures("one_rank")

TASKS, ROLLOUTS, STEPS = 8, 8, 12


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


def chosen(
    groups: list[Group], objective: ObjectiveSettings, version: int, memory: AdvantageMemory
) -> TrainingSelection:
    """What of a batch the objective trains on; of texts to imitate, the successes."""
    settings = BatchSettings(tokens_per_micro_batch=64)
    if objective.surrogate == "dpo":
        return preference_pairs(groups, settings, current_version=version, choose="all", most=4)
    if objective.surrogate == "kto":
        return labelled_rows(groups, settings, current_version=version)
    if objective.surrogate == "sft":
        groups = [Group(g.group_id, [s for s in g.rollouts if s.reward > 0]) for g in groups]
        settings = settings.model_copy(update={"drop_equal_reward": False})
    return select(
        [group for group in groups if group.rollouts],
        settings,
        advantages=partial(compute_advantages, objective, memory=memory),
        current_version=version,
    )


def train(
    folder: Path,
    name: str,
    seed: int,
    *,
    lr: float = 2e-2,
    shuffled: bool = False,
    minibatches: int = 1,
    epochs: int = 1,
) -> tuple[float, float]:
    """Mean reward of the first and the last two batches."""
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    tiny_model(folder, seed=seed)
    steps = {"minibatches": minibatches, "epochs": epochs}
    learner = build(folder, name, reference=folder, lr=lr, max_grad_norm=1.0, **steps)
    memory: AdvantageMemory = {}
    means = []
    for version in range(STEPS):
        groups = act(learner, version)
        means.append(float(np.mean(rewards(groups))))
        if shuffled:
            mixed = iter(order.permutation(rewards(groups)))
            for group in groups:
                for sample in group.rollouts:
                    sample.reward = next(mixed)
        selection = chosen(groups, learner.objective, version, memory)
        if selection.rows:
            others = mismatched_rows(selection.rows, limit=64) if name == "kto" else []
            result = train_batch(
                learner, selection.rows, version=version, budget=64, mismatched=others
            )
            assert result.applied
            assert result.metrics["gap_max"] < 1e-5
            if name != "dpo":  # whose turns may stand in several pairs
                assert result.metrics["turns_trained"] == epochs * len(selection.trained)
    return float(np.mean(means[:2])), float(np.mean(means[-2:]))


EACH = [
    pytest.param(name, marks=() if name == "grpo" else pytest.mark.slow, id=name)
    for name in PRESETS
]


@pytest.mark.parametrize("name", EACH)
def test_reward_rises_on_three_seeds(name: str, tmp_path: Path) -> None:
    for seed in range(3):
        before, after = train(tmp_path / str(seed), name, seed)
        assert before < 0.75
        assert after > 0.93


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "ipa"])
def test_reward_rises_with_several_updates_a_batch(name: str, tmp_path: Path) -> None:
    for seed in range(3):
        before, after = train(tmp_path / str(seed), name, seed, minibatches=2, epochs=2, lr=1e-2)
        assert before < 0.75
        assert after > 0.93


@pytest.mark.parametrize("name", EACH)
def test_without_a_learning_rate_it_does_not(name: str, tmp_path: Path) -> None:
    changes = [np.subtract(*train(tmp_path / str(seed), name, seed, lr=0.0)) for seed in range(3)]
    assert abs(np.mean(changes)) < 0.1


@pytest.mark.parametrize("name", EACH)
def test_with_shuffled_rewards_it_does_not(name: str, tmp_path: Path) -> None:
    runs = [train(tmp_path / str(seed), name, seed, shuffled=True) for seed in range(3)]
    assert np.mean([after - before for before, after in runs]) < 0.2

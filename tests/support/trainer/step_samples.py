"""Steps that were really taken, for tests of what is made of their records afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from support.trainer.row_samples import VOCABULARY, next_turn, tiny_model
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
)
from tracegrad.store import Decision, PolicyVersion, StepHistory, Store
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.train_loop import TrainLoop

TURNS = 3
# Optimizer steps on a batch: two a pass, two passes.
SEVERAL = {"lr": 1e-2, "minibatches": 2, "epochs": 2}


def rollout(name: str, task: str, *, reward: float, seed: int, at: float = 1000.0) -> list[Event]:
    """Three turns, each continuing the one before, with random tokens."""
    rng = np.random.default_rng(seed)
    turns: list[Turn] = []
    for index in range(TURNS):
        prompt = rng.integers(0, VOCABULARY - 1, 5).tolist()
        sampled = rng.integers(0, VOCABULARY - 1, 4 + seed % 3).tolist()
        logprobs = rng.normal(-4, 0.3, len(sampled)).tolist()
        turns.append(next_turn(name, turns, prompt, sampled, logprobs, created_at=at + index))
    return [
        RolloutStarted(rollout_id=name, task_id=task, opened_at=at),
        *turns,
        Reward(rollout_id=name, value=reward, created_at=at + 5),
        RolloutFinished(rollout_id=name, outcome=Outcome.COMPLETED, finished_at=at + 6),
    ]


def fill(store: Store, tasks: int, *, size: int = 2, first: int = 0) -> None:
    """Groups of `size` rollouts, one of which is good."""
    for task in range(first, first + tasks):
        for n in range(size):
            name = f"t{task}r{n}"
            at = 1000.0 + 10 * task + n
            store.append(rollout(name, f"t{task}", reward=float(n == 0), seed=10 * task + n, at=at))


def trainer_settings(folder: Path, **changes: Any) -> TrainerSettings:
    """With a tiny model of their own in `folder`, made at the first call."""
    model = folder / "model"
    if not model.exists():
        tiny_model(model)
        (model / "tokenizer_config.json").write_text("{}")
    given: dict[str, Any] = {
        "model": model,
        "state_dir": folder / "state",
        "batches": {"groups": 2, "group_size": 2, "tokens_per_micro_batch": 64},
        "optim": {"lr": 1e-2},
        "fsdp": {"device": "cpu", "threads": 1},
        "checkpoint": {"keep": 2},
    }
    return TrainerSettings.model_validate({**given, **changes})


def trained(folder: Path, tasks: int, steps: int, **changes: Any) -> TrainerSettings:
    """Settings with which so many steps were taken on groups of so many tasks."""
    settings = trainer_settings(folder, **changes)
    with Store.open(settings.proxy.store) as store:
        fill(store, tasks)
        train(settings, steps)
    return settings


def roll_back(settings: TrainerSettings, version: int, weights: int, newest: int) -> None:
    """As rank 0 does it: `version`, which has the weights of step `weights`, is served again."""
    with Store.open(settings.proxy.store) as store:
        given = Decision(
            kind="rollback", version=version, training="continue", by="ann@host", reason="tested"
        )
        last = StepHistory(store).steps(1)[0].step
        outcome = {"version": version, "weights_step": weights, "newest": newest, "last_step": last}
        store.close_decision(store.decide(given), outcome)
        detail = {"weights_step": weights}
        store.record_version(PolicyVersion(version, weights or None, "serving", detail=detail))


def train(settings: TrainerSettings, steps: int) -> None:
    """As many optimizer steps, in this process."""
    with ExitStack() as stack:
        training = TrainLoop(
            settings, stack, stopping=lambda: False, supply=RolloutSupply(is_open=False)
        )
        training.resume()
        for _ in range(steps):
            assert training.next_action() == "train"
            training.train_batch()
        training.commit_pending()

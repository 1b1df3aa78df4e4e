"""Steps that were really taken, for tests of what is made of their records afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from support.trainer.row_samples import VOCABULARY, tiny_model
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Store
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.train_loop import TrainLoop

TURNS = 3
# Optimizer steps on a batch: two a pass, two passes.
SEVERAL = {"lr": 1e-2, "minibatches": 2, "epochs": 2}


def rollout(name: str, task: str, *, reward: float, seed: int, at: float = 1000.0) -> list[Event]:
    """Three turns, each continuing the one before, with random tokens."""
    rng = np.random.default_rng(seed)
    events: list[Event] = [RolloutStarted(rollout_id=name, task_id=task, opened_at=at)]
    context = token_id_array()
    parent: str | None = None
    for index in range(TURNS):
        prompt = context + token_id_array(rng.integers(0, VOCABULARY - 1, 5).tolist())
        sampled = token_id_array(rng.integers(0, VOCABULARY - 1, 4 + seed % 3).tolist())
        turn = Turn(
            turn_id=f"{name}.{index}",
            rollout_id=name,
            parent_id=parent,
            dialect="chat",
            model="m",
            prompt_token_ids=prompt,
            completion_token_ids=sampled,
            completion_logprobs=logprob_array(rng.normal(-4, 0.3, len(sampled)).tolist()),
            policy_versions=((0, len(sampled)),),
            created_at=at + index,
        )
        events.append(turn)
        context, parent = prompt + sampled, turn.turn_id
    events.append(Reward(rollout_id=name, value=reward, created_at=at + 5))
    events.append(RolloutFinished(rollout_id=name, outcome=Outcome.COMPLETED, finished_at=at + 6))
    return events


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

"""A model folder and a store with finished groups: what `trainer step` needs, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

from support.trainer.row_samples import next_turn
from support.trainer.tiny_model import tiny_qwen3, tiny_tokenizer
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
)
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings

VOCABULARY = 300  # of the tokens that are drawn; the tokenizer has some more
LONG_AGO = 1.7e9

SMALL: dict[str, object] = {
    "batches.groups": 2,
    "batches.group_size": 3,
    "batches.tokens_per_micro_batch": 128,
    "batches.max_staleness": "null",
    "optim.lr": 1e-2,
    "fsdp.threads": 1,
    "fsdp.device": "cpu",
    "fsdp.reshard": "false",
}


def save_smallest_model(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen3 that makes a step in some 20 ms, with a tokenizer."""
    tokenizer = tiny_tokenizer()
    model = tiny_qwen3(len(tokenizer), seed=seed, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings_of(model: Path, state_dir: Path, **changes: object) -> TrainerSettings:
    """Changes as `optim__lr=...`."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    every = {"model": model, "state_dir": state_dir, **SMALL, **named}
    return load_settings(None, [f"{name}={value}" for name, value in every.items()])


def fill(url: str, *, groups: int, group_size: int = 3, seed: int = 0, first: int = 0) -> list[str]:
    """Adds finished groups of short rollouts -> the ids of all their turns. Of seven groups the
    third and the fourth have equal rewards: with two groups a batch, some batches have only such.
    """
    draw = random.Random(seed)
    turns: list[str] = []
    events: list[Event] = []
    for group in range(first, first + groups):
        for number in range(group_size):
            rollout = f"g{group:03d}-{number}"
            made = _turns(draw, rollout)
            turns += [turn.turn_id for turn in made]
            reward = 1.0 if group % 7 in (2, 3) else float((number + group) % 2)
            when = LONG_AGO + group * 10 + number
            events += [
                RolloutStarted(rollout_id=rollout, task_id=f"task {group:03d}", opened_at=when - 5),
                *made,
                Reward(rollout_id=rollout, value=reward, created_at=when),
                RolloutFinished(rollout_id=rollout, outcome=Outcome.COMPLETED, finished_at=when),
            ]
    with Store.open(url) as store:
        store.append(events)
    return turns


def _turns(draw: random.Random, rollout: str) -> list[Turn]:
    """One to three turns, each of which continues the one before."""
    made: list[Turn] = []
    for _ in range(draw.randint(1, 3)):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 6))]
        completion = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 8))]
        logprobs = [draw.uniform(-7, -4) for _ in completion]
        fields = {"model": "policy", "sampling": {"temperature": 1.0}}
        made.append(next_turn(rollout, made, prompt, completion, logprobs, **fields))
    return made


def steps_of(url: str) -> list[StepRecord]:
    with Store.open(url, create=False) as store:
        return Ledger(store).steps()

"""Stores with traces to learn from, and a tiny model with a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.trainer.char_model import save_char_model
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
from tracegrad.store import ALL, RolloutFilter, Store
from tracegrad.store.copy.import_records import import_rollouts
from tracegrad.transfer.chat_conversations import read_conversation
from tracegrad.transfer.field_reader import FieldReader
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.sft.config import SftSettings, load_sft_settings


def char_model(folder: Path) -> Path:
    if not folder.exists():
        save_char_model(folder)
    return folder


def store_at(folder: Path) -> Store:
    folder.mkdir(parents=True, exist_ok=True)
    return Store.open(f"sqlite:///{folder}/store.db")


def rollout(
    rollout_id: str,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    task: str | None = "t",
    reward: float | None = 1.0,
    outcome: Outcome | None = Outcome.COMPLETED,
    changes: dict[int, dict[str, Any]] | None = None,
    at: float = 1000.0,
) -> list[Event]:
    """Facts of a rollout whose turns follow each other; each is (new prompt tokens, sampled)."""
    events: list[Event] = [RolloutStarted(rollout_id=rollout_id, task_id=task, opened_at=at)]
    before = token_id_array()
    parent: str | None = None
    for number, (prompt, sampled) in enumerate(turns):
        given: dict[str, Any] = {
            "turn_id": f"{rollout_id}.{number}",
            "rollout_id": rollout_id,
            "parent_id": parent,
            "dialect": "chat",
            "model": "m",
            "prompt_token_ids": before + token_id_array(prompt),
            "completion_token_ids": token_id_array(sampled),
            "completion_logprobs": logprob_array([-1.0] * len(sampled)),
            "policy_versions": ((0, len(sampled)),),
            "sampling": {"temperature": 0.5},
            "finish_reason": "stop",
            "created_at": at + number,
        }
        one = Turn(**(given | (changes or {}).get(number, {})))
        events.append(one)
        before, parent = one.prompt_token_ids + one.completion_token_ids, one.turn_id
    if reward is not None:
        events.append(
            Reward(
                reward_id=f"{rollout_id}.reward", rollout_id=rollout_id, value=reward, created_at=at
            )
        )
    if outcome is not None:
        events.append(RolloutFinished(rollout_id=rollout_id, outcome=outcome, finished_at=at + 60))
    return events


def teach(store: Store, *conversations: dict[str, Any]) -> None:
    """Text only, as `tracegrad import` stores it."""
    copies = [read_conversation(FieldReader(each, "")).as_record(1000.0) for each in conversations]
    import_rollouts(store, copies)


def said(*texts: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def settings(
    model: Path, folder: Path, which: RolloutFilter = ALL, *, preset: str = "sft", **changes: Any
) -> SftSettings:
    """`changes` of the run; tables of the trainer as `optim={...}`."""
    tables = {name: changes.pop(name) for name in list(changes) if name in TABLES}
    values: dict[str, Any] = {
        "model": model,
        "state_dir": folder,
        "objective": {"preset": preset},
        "fsdp": {"device": "cpu", "threads": 1},
        "batches": {"tokens_per_micro_batch": 256},
        "optim": {"lr": 1e-2},
    }
    trainer = TrainerSettings.model_validate(values | tables)
    return load_sft_settings(trainer, which, preset=preset, **changes)


TABLES = ("objective", "fsdp", "batches", "optim", "checkpoint", "ranks", "seed", "reference")

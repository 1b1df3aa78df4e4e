"""Events for the store's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
    logprob_array,
    token_id_array,
)

_PLAIN = {"dialect": "chat", "model": "m"}


def make_turn(
    turn_id: str,
    rollout_id: str = "r",
    *,
    new: Iterable[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    parent: Turn | None = None,
    version: int = 0,
    **more: Any,
) -> Turn:
    """A turn whose prompt is its parent's context followed by `new`."""
    known = parent.prompt_token_ids + parent.completion_token_ids if parent else token_id_array()
    return Turn(
        turn_id=turn_id,
        rollout_id=rollout_id,
        parent_id=parent.turn_id if parent else None,
        prompt_token_ids=known + token_id_array(new),
        completion_token_ids=token_id_array(sampled),
        completion_logprobs=logprob_array([-0.5] * len(sampled)),
        policy_versions=((version, len(sampled)),) if sampled else (),
        **(_PLAIN | more),
    )


def chain(rollout_id: str, length: int, *, behind: Turn | None = None, **more: Any) -> list[Turn]:
    """Turns each of which continues the one before, the first of them `behind`. `more` as for
    `make_turn`, or functions of the turn's number."""
    turns: list[Turn] = []
    for number in range(length):
        own = {name: value(number) if callable(value) else value for name, value in more.items()}
        behind = make_turn(f"{rollout_id}.{number}", rollout_id, parent=behind, **own)
        turns.append(behind)
    return turns


def make_span(number: int, rollout_id: str | None = None, **more: Any) -> Span:
    given: dict[str, Any] = {"trace_id": f"{number:032x}", "name": f"s{number}", "start_ns": number}
    given = {**given, "end_ns": number + 1, **more}
    return Span(span_id=f"{number:016x}", rollout_id=rollout_id, **given)


def rollout_events(
    rollout_id: str,
    *,
    task: str | None = "task",
    reward: float | None = 1.0,
    outcome: Outcome | None = Outcome.COMPLETED,
    at: float = 1000.0,
    turns: int = 2,
    tags: dict[str, str] | None = None,
    version: int = 0,
    held_out: bool = False,
) -> list[Event]:
    """Opened at `at`, finished a second later; each turn continues the one before."""
    events: list[Event] = [
        RolloutStarted(
            rollout_id=rollout_id,
            task_id=task,
            tags=tags or {},
            held_out=held_out,
            opened_at=at,
        ),
        *chain(rollout_id, turns, created_at=at, version=version),
    ]
    if reward is not None:
        events.append(Reward(rollout_id=rollout_id, value=reward, created_at=at))
    if outcome is not None:
        events.append(RolloutFinished(rollout_id=rollout_id, outcome=outcome, finished_at=at + 1))
    return events

"""Attempts at two tasks by two versions: what `rollouts pass` shows is theirs."""

from __future__ import annotations

from support.store.events import rollout_events
from tracegrad.events import Event, Outcome
from tracegrad.store import Store

# Version, task, rewards; None: nobody said.
TRIED = (
    (1, "easy", [1.0, 0.0, 1.0, None]),
    (1, "hard", [0.0, 0.0]),
    (2, "easy", [1.0, 1.0, 1.0, 1.0]),
    (2, "hard", [0.0, 1.0, 0.0, 0.0]),
)


def tried_samples(store: Store) -> None:
    """In turn of the splits test and train; and two that say nothing of the policy."""
    attempts = [(version, task, reward) for version, task, rewards in TRIED for reward in rewards]
    events: list[Event] = []
    for number, (version, task, reward) in enumerate(attempts, start=1):
        tags = {"split": "test" if number % 2 else "train"}
        events += rollout_events(
            f"r{number:02}", task=task, reward=reward, version=version, tags=tags
        )
    events += rollout_events("open", outcome=None)
    events += rollout_events("broken", outcome=Outcome.ENV_ERROR)
    store.append(events)

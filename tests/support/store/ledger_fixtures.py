"""A ledger, rollouts to lease from it, and the names of what was leased."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from support.store.events import rollout_events
from tracegrad.store import Group, Ledger, StepRecord, Store, lease_by_rollout
from tracegrad.store.databases import statements


class FakeClock:
    """The database's clock, moved by the test: nobody waits for a lease to end. Threads read it
    too."""

    def __init__(self) -> None:
        self.now = time.time()

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(statements, "server_time", lambda _connection: made.now)
    return made


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store)


def fill(store: Store, tasks: int, size: int, **more: Any) -> None:
    for task in range(tasks):
        for n in range(size):
            at = 1000.0 + 10 * task + n
            store.append(rollout_events(f"t{task}.{n}", task=f"t{task}", at=at, **more))


def lease(ledger: Ledger, groups: int = 1, size: int = 2, **more: Any) -> list[Group]:
    wanted: dict[str, Any] = {"owner": "me", "ttl_s": 60.0, "tags": {}} | more
    return ledger.lease(groups=groups, group_size=size, **wanted)


def commit(ledger: Ledger, groups: Sequence[Group] = (), step: int = 1, **more: Any) -> None:
    """A step that trains all turns of the groups; `more` is of the step, or of `commit_step`."""
    given: dict[str, Any] = {
        "trained": [turn for group in groups for turn in turn_ids(group)],
        "skipped": {},
        "rollouts": [rollout for group in ids(groups) for rollout in group],
        "leases": lease_by_rollout(groups),
    }
    given |= {name: more.pop(name) for name in (*given, "advantages") if name in more}
    ledger.commit_step(StepRecord(**{"step": step, "version": step, **more}), **given)


def ids(groups: Sequence[Group]) -> list[list[str]]:
    return [[rollout.rollout_id for rollout in group.rollouts] for group in groups]


def turn_ids(group: Group) -> list[str]:
    return [turn.turn_id for rollout in group.rollouts for turn in rollout.turns]

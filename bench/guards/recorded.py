"""The rollouts of a run that has ended, in the batches in which its trainer looked at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sqlalchemy import select

from tracegrad.events import Turn
from tracegrad.store import Ledger, Store
from tracegrad.store.expressions import MAIN_REWARD_NAME
from tracegrad.store.models import Rollouts, TurnLedger, Turns
from tracegrad.store.read.rollouts import load_rewards
from tracegrad.store.read.turns import load_turns

_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRollout:
    turns: Sequence[Turn]  # with requests and responses
    reward: float
    version: int  # of the policy that sampled it last


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """`alarms`: that guards raised while it trained, by its steps' own metrics. `agent`: whose task
    it was. `entropy`: the smallest of a step, nats a token."""

    groups: Sequence[Sequence[RecordedRollout]]
    steps: int
    alarms: int
    agent: str = "shop"
    entropy: float | None = None

    @property
    def rollouts(self) -> int:
        return sum(len(group) for group in self.groups)


def read_run(url: str, most: int) -> RecordedRun:
    """Of its first `most` rollouts that training looked at. Raises StoreError."""
    with Store.open(url, create=False) as store:
        steps = Ledger(store).steps()
        rollouts = _looked_at(store)[:most]
        groups = [
            group
            for begin in range(0, len(rollouts), _AT_A_TIME)
            for group in _groups(store, rollouts[begin : begin + _AT_A_TIME])
        ]
        alarms = sum(int(step.metrics.get("drift_alarms", 0)) for step in steps)
        [agent] = {row.agent or "" for row in store.rollouts(limit=1)} or {""}
    entropies = [step.metrics["entropy"] for step in steps if "entropy" in step.metrics]
    return RecordedRun(groups, len(steps), alarms, agent, min(entropies, default=None))


def _looked_at(store: Store) -> list[tuple[str, str]]:
    """(rollout, its task), as their turns were settled: those of a step at one moment."""
    query = (
        select(TurnLedger.created_at, Rollouts.task_id, Rollouts.rollout_id)
        .join(Turns, TurnLedger.turn_id == Turns.turn_id)
        .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        .where(Rollouts.task_id.is_not(None))
        .order_by(TurnLedger.created_at, Rollouts.task_id, Rollouts.rollout_id)
    )
    with store.reading() as connection:
        rows = connection.execute(query).tuples().all()
    return list(dict.fromkeys((rollout, str(task)) for _, task, rollout in rows))


def _groups(
    store: Store, rollouts: Sequence[tuple[str, str]]
) -> Iterator[Sequence[RecordedRollout]]:
    ids = [rollout for rollout, _ in rollouts]
    with store.reading() as connection:
        turns = load_turns(connection, ids, expert_routing=False)
        events = load_rewards(connection, ids)
    for _, some in groupby(rollouts, key=lambda one: one[1]):
        group = []
        for rollout, _ in some:
            rewards = [
                event.value
                for event in events[rollout]
                if event.name == MAIN_REWARD_NAME and event.turn is None and event.value is not None
            ]
            if rewards:
                versions = [v for turn in turns[rollout] for v, _ in turn.policy_versions]
                group.append(RecordedRollout(turns[rollout], rewards[-1], max(versions, default=0)))
        if group:
            yield group

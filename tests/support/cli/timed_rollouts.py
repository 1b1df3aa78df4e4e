"""Rollouts whose every second is known: what `rollouts time` shows is theirs."""

from __future__ import annotations

from sqlalchemy import update

from support.store.events import make_turn
from tracegrad.events import (
    CALL_STAGES,
    Event,
    Json,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
)
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad.store.models import Leases, Rollouts

BEGAN = 1_763_640_000.0
TRAINED, WAITS, OLD = (f"0193c0de030{number}" + "0" * 20 for number in range(3))


def stages(prefill: float, decode: float, **more: float) -> Json:
    """A call that waited for nothing but the engine, unless `more` says so."""
    own: Json = {"prepare": 0.002, "gate": 0.0, "encode": 0.001, "queue": 0.0}
    found = own | {"prefill": prefill, "decode": decode, "finish": 0.001} | more
    return {stage: found[stage] for stage in CALL_STAGES if stage in found}


def trained() -> list[Event]:
    """Four calls, two of them at once; weights were pushed before the third and in the fourth, and
    before the third the engine worked on the second."""
    name = TRAINED
    first = make_turn("a", name, timing=stages(0.4, 2.0, engine_queue=0.0), created_at=BEGAN + 4.0)
    calls = [
        first,
        make_turn("b", name, parent=first, created_at=BEGAN + 8.0,
                  timing=stages(0.3, 1.0, engine_queue=0.0) | {"commits": {"a": 0.006}}),
        make_turn("c", name, parent=first, created_at=BEGAN + 9.0,
                  timing=stages(0.1, 3.0, gate=1.2, engine_queue=0.2)),
        make_turn("d", name, created_at=BEGAN + 16.0,
                  timing=stages(0.5, 2.5, engine_queue=0.0)
                  | {"held": 0.3, "commits": {"b": 0.005, "c": 0.02}}),
    ]  # fmt: skip
    return [
        RolloutStarted(rollout_id=name, task_id="mend-the-cart", opened_at=BEGAN),
        *calls,
        Reward(rollout_id=name, value=1.0, created_at=BEGAN + 21.5),
        RolloutFinished(rollout_id=name, finished_at=BEGAN + 22.0),
    ]


def waits() -> list[Event]:
    """The engine was away for a while, and says nothing of its queue; nobody has rewarded it."""
    turn = make_turn("w", WAITS, timing=stages(0.2, 1.5, queue=9.0), created_at=BEGAN + 112.0)
    return [
        RolloutStarted(rollout_id=WAITS, task_id="mend-the-cart", opened_at=BEGAN + 100),
        turn,
        RolloutFinished(rollout_id=WAITS, outcome=Outcome.COMPLETED, finished_at=BEGAN + 114),
    ]


def old() -> list[Event]:
    """As before revision 0013."""
    return [
        RolloutStarted(rollout_id=OLD, task_id="sort-a-list", opened_at=BEGAN - 1000),
        make_turn("o", OLD, created_at=BEGAN - 994),
        Reward(rollout_id=OLD, value=0.0, created_at=BEGAN - 991),
        RolloutFinished(rollout_id=OLD, finished_at=BEGAN - 990),
    ]


def timed_samples(store: Store) -> None:
    store.append([*trained(), *waits(), *old()])
    ledger = Ledger(store)
    [group] = [
        group
        for group in ledger.lease(groups=2, group_size=1, owner="trainer", ttl_s=60)
        if group.rollouts[0].rollout_id == TRAINED
    ]
    ledger.commit_step(
        StepRecord(step=1, version=1, created_at=BEGAN + 41),
        trained=[turn.turn_id for turn in group.rollouts[0].turns],
        skipped={},
        rollouts=[TRAINED],
        leases={TRAINED: group.lease_id},
    )
    with store.exclusive() as connection:
        connection.execute(
            update(Leases).where(Leases.rollout_id == TRAINED).values(leased_at=BEGAN + 30)
        )
        connection.execute(
            update(Rollouts).where(Rollouts.rollout_id == TRAINED).values(consumed_at=BEGAN + 41)
        )

"""Steps with metrics as a trainer records them, and pushes of their versions."""

from __future__ import annotations

import math
import time
from typing import Any

from sqlalchemy import insert

from support.store.ledger_fixtures import commit, fill, lease
from tracegrad.store import Decision, Group, Ledger, PolicyVersion, Store
from tracegrad.store.models import Steps, VersionEvents


def step_metrics(step: int) -> dict[str, Any]:
    """Of a run that learns, with waves, and a stage that only every tenth step has."""
    wave = math.sin(step / 9)
    seconds = {"wait": 4 + 2 * wave, "train": 2.5, "push": 0.8, "start": 0.1}
    return {
        "reward_mean": 1 - math.exp(-step / 60) + 0.05 * wave,
        "reward_std": 0.4,
        "group_spread": 0.3 + 0.1 * wave,
        "rollouts": 16.0,
        "turns": 48.0,
        "turns_skipped": 4.0,
        "skipped_stale": 4.0,
        "turns_trained": 44.0,
        "loss": -0.01 + 0.02 * wave,
        "grad_norm": 0.6 + 0.2 * wave,
        "entropy": 2.5 * math.exp(-step / 200) + 0.3,
        "k1": 0.002 * wave,
        "k3": 0.004 + 0.002 * wave,
        "ess": 0.95 - 0.03 * wave,
        "clipped_turn_share": 0.04 + 0.02 * wave,
        "staleness_mean": 0.6 + 0.2 * wave,
        "staleness_max": 2.0,
        "sampled_tokens": 4000.0,
        "lag_share_0": 0.5 + 0.1 * wave,
        "lag_share_1": 0.4 - 0.1 * wave,
        "lag_share_2": 0.1,
        "gap_tokens": 2000.0,
        "gap_mean": 2e-6,
        "gap_p50": 1e-6,
        "gap_p99": 8e-6,
        "gap_max": 3e-5,
        "tokens_per_second": 12_345.0,
        "seconds": seconds | ({"checkpoint": 1.5} if step % 10 == 0 else {}),
    }


def write_steps(store: Store, numbers: range, *, seconds_apart: float = 10.0, **more: Any) -> None:
    """Rows alone: no ledger, so that thousands are quick. The last one is of now."""
    now = time.time()
    steps, events = [], []
    for step in numbers:
        at = now - seconds_apart * (numbers[-1] - step)
        row = {"settings": {}, "metrics": step_metrics(step), "checkpoint": f"/c/{step}"}
        others: dict[str, Any] = dict.fromkeys(
            ("batch", "run_id", "manifest_digest", "parent_digest")
        )
        steps.append({"step": step, "version": step, "created_at": at, **others, **row, **more})
        detail = {"seconds": {"write": 0.5, "load": 0.3}, "paused_s": 0.25, "held_s": 0.125}
        push = {"version": step, "step": step, "created_at": at + 1, "detail": detail}
        events.append(push | {"state": "serving"})
    with store.exclusive() as connection:
        connection.execute(insert(Steps), steps)
        connection.execute(insert(VersionEvents), events)


def trained_step(store: Store, step: int = 1, **more: Any) -> list[Group]:
    """A step of two groups of two rollouts whose second turns were skipped; its groups."""
    fill(store, tasks=2, size=2)
    ledger = Ledger(store)
    groups = lease(ledger, groups=2)
    turns = [[turn.turn_id for turn in one.turns] for group in groups for one in group.rollouts]
    trained = [turn for of_one in turns for turn in of_one[:1] + of_one[2:]]
    given: dict[str, Any] = {
        "trained": trained,
        "skipped": {of_one[1]: "stale" for of_one in turns},
        "batch": {"groups": batch_groups(groups)},
        "metrics": {"turns": float(sum(map(len, turns))), "turns_skipped": float(len(turns))},
    }
    commit(ledger, groups, step, **(given | more))
    return groups


def batch_groups(groups: list[Group]) -> list[dict[str, Any]]:
    """As a step records them."""
    return [
        {
            "group_id": group.group_id,
            "rollouts": [
                {
                    "rollout_id": one.rollout_id,
                    "reward": one.reward,
                    "turn_rewards": {str(n): value for n, value in one.turn_rewards.items()},
                    "turns": len(one.turns),
                }
                for one in group.rollouts
            ],
        }
        for group in groups
    ]


def pause_training(store: Store, reason: str, *, by: str = "ann@host") -> None:
    seq = store.decide(Decision(kind="pause", by=by, reason=reason))
    store.close_decision(seq, {})


def serve(store: Store, version: int, **detail: Any) -> None:
    for state in ("pushing", "serving"):
        store.record_version(PolicyVersion(version, version, state, detail=detail))  # type: ignore[arg-type]

"""What a trainer leaves in a store after thousands of steps, as rows: steps with their numbers and
batches, what became of the turns, versions with their pushes, decisions about some of them."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator

from tracegrad.inspect.step_metrics import SECTIONS

GROUPS, ATTEMPTS = 8, 4
ROLLOUTS_A_STEP = GROUPS * ATTEMPTS
# Every so many versions one is evaluated, promoted and pinned; other weights are soon off the disk.
PROMOTED_EVERY = 100
KEPT_LAST = 4
_SETTINGS = {
    "data": {"tags": {"split": "train"}},
    "batches": {"group_size": ATTEMPTS},
    "rewards": {},
    # A trainer's settings are 5 KB.
    "others": "x" * 5_000,
}
_SECONDS = ("wait", "lease", "build", "train", "push", "checkpoint", "commit")
_PUSH_SECONDS = ("write", "stage", "hold", "pause", "load", "set_version", "resume", "release")
Row = tuple[object, ...]
IdOf = Callable[[int], str]  # a rollout's number -> its id


def step_of(number: int, steps: int) -> int | None:
    """The step that trained the rollout of this number; None: none did, or it is the first, which
    the store itself wrote."""
    step = 1 + (number - 1) // ROLLOUTS_A_STEP
    return step if number and step <= steps else None


def add_steps(database: sqlite3.Connection, steps: int, id_of: IdOf, began: float) -> None:
    """Of rollouts that are there, with one turn each."""
    settings = json.dumps(_SETTINGS)
    database.executemany(
        "INSERT INTO steps (step, version, created_at, settings, metrics, batch, run_id)"
        " VALUES (?, ?, ?, ?, ?, ?, 'a-run')",
        (
            (step, step, began + 60 * step, settings, _metrics(step), _batch(step, id_of))
            for step in range(1, steps + 1)
        ),
    )
    database.executemany(
        "INSERT INTO turn_ledger (turn_id, step, created_at, advantage) VALUES (?, ?, ?, ?)",
        (
            (f"{id_of(n)}.0", step_of(n, steps), began + n, math.sin(n))
            for n in range(1, steps * ROLLOUTS_A_STEP + 1)
        ),
    )
    events = list(_events(steps, began))
    database.executemany(
        "INSERT INTO version_events (version, step, state, created_at, detail)"
        " VALUES (?, ?, ?, ?, ?)",
        events,
    )
    newest = {event[0]: event for event in events}
    database.executemany("INSERT INTO policy_versions VALUES (?, ?, ?, ?, ?)", newest.values())
    database.executemany(
        "INSERT INTO decisions (kind, version, by, reason, created_at, acted_at, outcome)"
        " VALUES (?, ?, 'gate:held_out', 'better by 0.01', ?, ?, ?)",
        _decisions(steps, began),
    )


def _metrics(step: int) -> str:
    """A number for each name that a step can have."""
    names = [name for metrics in SECTIONS.values() for name in metrics]
    plain = [name for name in names if "/" not in name and not name.endswith("…")]
    values: dict[str, object] = {name: math.sin(step + place) for place, name in enumerate(plain)}
    values |= {f"lag_share_{lag}": 0.25 for lag in range(4)} | {"gap_tokens": 256.0}
    values["seconds"] = {name: 1.0 + math.sin(step) / 2 for name in _SECONDS}
    return json.dumps(values)


def _batch(step: int, id_of: IdOf) -> str:
    first = (step - 1) * ROLLOUTS_A_STEP + 1
    groups = [
        {
            "group_id": f"group-{step}-{group}",
            "rollouts": [
                {
                    "rollout_id": id_of(n),
                    "reward": float(n % 4 == 0),
                    "turn_rewards": {},
                    "turns": 1,
                }
                for n in range(first + group * ATTEMPTS, first + (group + 1) * ATTEMPTS)
            ],
        }
        for group in range(GROUPS)
    ]
    return json.dumps({"groups": groups})


def _events(steps: int, began: float) -> Iterator[Row]:
    for version in range(steps + 1):
        at, step = began + 60 * version, version or None
        made = {"weights_step": version, "gate": "none"}
        pushed = made | {
            "seconds": dict.fromkeys(_PUSH_SECONDS, 0.01),
            "paused_s": 0.1,
            "held_s": 0.2,
            "bytes": 4_000_000,
            "gap": {"tokens": 256, "mean": 1e-6, "p50": 1e-6, "p99": 1e-5, "max": 1e-5},
            "base": {"path": "a-model-folder", "weights": "0" * 64, "lora": None},
        }
        yield version, step, "pushing", at, json.dumps(made)
        yield version, step, "serving", at + 1, json.dumps(pushed)
        kept = {"bytes": 4_000_000, "weights_step": version}
        yield version, step, "kept", at + 2, json.dumps(kept)
        if version % PROMOTED_EVERY == 0:
            found = {"verdict": "promote", "mean_candidate": 0.75, "mean_baseline": 0.5}
            counts = {"n_candidate": 16, "n_baseline": 12}
            yield version, step, "evaluated", at + 30, json.dumps(found | counts)
        elif version <= steps - KEPT_LAST:
            yield version, step, "not_kept", at + 50, json.dumps({"reason": "beyond_keep"})


def _decisions(steps: int, began: float) -> Iterator[Row]:
    for version in range(0, steps + 1, PROMOTED_EVERY):
        for kind in ("promote", "pin"):
            at = began + 60 * version + 31
            yield kind, version, at, at + 1, json.dumps({"version": version})

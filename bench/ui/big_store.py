"""A store of many small rollouts, of which a trainer has made steps, made once: rows as the store
writes them, without its checks."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.ui.training_history import ROLLOUTS_A_STEP, add_steps, step_of
from tracegrad.events import (
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Store

BEGAN = 1_780_000_000.0
TASKS, AGENTS = 5_000, 3
_OUTCOMES = ("completed", "completed", "completed", "agent_error", "budget", "env_error")
_BATCH = 20_000
Row = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StoreSize:
    """`steps` of the first rollouts, `ROLLOUTS_A_STEP` each."""

    rollouts: int
    steps: int

    def __post_init__(self) -> None:
        if self.steps * ROLLOUTS_A_STEP >= self.rollouts:
            raise ValueError(f"{self.rollouts:,} rollouts are too few for {self.steps:,} steps")


def make_store(path: Path, size: StoreSize) -> Store:
    """At `path`, unless it is there already."""
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        _make(draft, size)
        draft.rename(path)
    return Store.open(f"sqlite:///{path}")


def _make(path: Path, size: StoreSize) -> None:
    with Store.open(f"sqlite:///{path}") as store:
        store.append(_pattern())
    database = sqlite3.connect(path)
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA cache_size = -200000")
    columns = [row[1] for row in database.execute("PRAGMA table_info(turns)")]
    pattern = dict(zip(columns, database.execute("SELECT * FROM turns").fetchone(), strict=True))
    numbers = iter(range(1, size.rollouts))
    while some := list(islice(numbers, _BATCH)):
        database.executemany(
            "INSERT INTO rollouts (rollout_id, opened, opened_at, task_id, agent, outcome,"
            " finished_at, consumed_at, consumed_step) VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?)",
            _rollouts(some, size.steps),
        )
        marks = ", ".join("?" * (len(columns) - 1))
        names = ", ".join(columns[1:])
        database.executemany(
            f"INSERT INTO turns ({names}) VALUES ({marks})", _turns(some, columns, pattern)
        )
        database.executemany(
            "INSERT INTO rewards (reward_id, rollout_id, value, name, source, created_at)"
            " VALUES (?, ?, ?, 'reward', 'admin_key', ?)",
            ((f"w{n}", id_of(n), float(n % 4 == 0), BEGAN + n + 1) for n in some if n % 10),
        )
        database.executemany(
            "INSERT INTO rollout_tags (rollout_id, key, value, position) VALUES (?, 'split', ?, 0)",
            ((id_of(n), "test" if n % 50 == 0 else "train") for n in some),
        )
        database.commit()
    add_steps(database, size.steps, id_of, BEGAN)
    database.commit()
    database.close()


def id_of(number: int) -> str:
    """Of the rollout that was opened as this one."""
    return f"{number:012x}{'0' * 20}"


def _rollouts(numbers: list[int], steps: int) -> Iterator[Row]:
    for n in numbers:
        step = step_of(n, steps)
        ended = None if n % 1000 == 0 and step is None else BEGAN + n + 30
        outcome = None if ended is None else _OUTCOMES[n % len(_OUTCOMES)]
        named = (id_of(n), BEGAN + n, f"task-{n % TASKS}", f"agent-{n % AGENTS}")
        yield (*named, outcome, ended, None if step is None else BEGAN + n + 60, step)


def _turns(numbers: list[int], columns: list[str], pattern: dict[str, object]) -> Iterator[Row]:
    for n in numbers:
        own = {"turn_id": f"{id_of(n)}.0", "rollout_id": id_of(n), "created_at": BEGAN + n + 5}
        yield tuple((pattern | own | {"last_version": n // 10_000})[name] for name in columns[1:])


def _pattern() -> list[RolloutStarted | Turn | Reward | RolloutFinished]:
    """One rollout, which the store itself writes."""
    first = id_of(0)
    turn = Turn(
        turn_id=f"{first}.0",
        rollout_id=first,
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array(range(40)),
        completion_token_ids=token_id_array(range(20)),
        completion_logprobs=logprob_array([-0.5] * 20),
        policy_versions=((0, 20),),
        request={"messages": [{"role": "user", "content": "What is 17 times 23?"}]},
        response={"choices": [{"message": {"role": "assistant", "content": "391"}}]},
        created_at=BEGAN,
    )
    return [
        RolloutStarted(rollout_id=first, task_id="task-0", agent="agent-0", opened_at=BEGAN),
        turn,
        Reward(rollout_id=first, value=1.0),
        RolloutFinished(rollout_id=first, finished_at=BEGAN + 30),
    ]

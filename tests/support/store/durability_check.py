"""Whether a store has kept what it acknowledged to its writers; every loss by its name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select, text

from support.store.workload import Acknowledged, Submission, rollout_id, waves
from tracegrad.events import Event, Reward, RolloutFinished, RolloutStarted, Span, Turn
from tracegrad.store import RolloutSummary, Store
from tracegrad.store.models import Outcomes
from tracegrad.store.read.rollouts import load_rewards, load_spans
from tracegrad.store.read.turns import load_turns

_AT_ONCE = 200
_HEAPS = """
SELECT relname, found.msg FROM pg_class c, LATERAL verify_heapam(c.oid) found
WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
"""
_INDEXES = """
SELECT bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = c.relam
WHERE c.relkind = 'i' AND a.amname = 'btree' AND c.relnamespace = 'public'::regnamespace
"""


@dataclass
class DurabilityReport:
    """What is wrong with a store, in words, and how much was looked at."""

    faults: list[str] = field(default_factory=list)
    acknowledged: int = 0  # submissions
    unacknowledged: Counter[str] = field(default_factory=Counter)  # "whole" | "absent"
    turns: int = 0


@dataclass(frozen=True)
class _Stored:
    row: RolloutSummary | None
    turns: Mapping[str, Turn]
    rewards: Mapping[str, Reward]
    spans: Mapping[str, Span]

    def has(self, event: Event) -> bool | None:
        """None: there is something of it, and it is not what was sent."""
        match event:
            case RolloutStarted():
                if self.row is None or self.row.task_id is None:
                    return False
                same = (self.row.task_id, self.row.agent, self.row.tags, self.row.opened_at) == (
                    event.task_id,
                    event.agent,
                    event.tags,
                    event.opened_at,
                )
                return same or None
            case RolloutFinished():
                if self.row is None or self.row.outcome is None:
                    return False
                same = (self.row.outcome, self.row.finished_at) == (
                    event.outcome,
                    event.finished_at,
                )
                return same or None
            case Turn():
                return _same(self.turns.get(event.turn_id), event)
            case Reward():
                return _same(self.rewards.get(event.reward_id), event)
            case Span():
                return _same(self.spans.get(event.span_id), event)


def _same(stored: Event | None, sent: Event) -> bool | None:
    if stored is None:
        return False
    return True if stored == sent else None


def check_durability(
    store: Store, seed: str, acknowledged: Mapping[str, Acknowledged]
) -> DurabilityReport:
    """Every submission that any of the agents can have made, looked up."""
    _wait_for_killed_clients(store)
    found = DurabilityReport()
    expected = {
        rollout_id(agent, number): waves(seed, agent, number)
        for agent, each in acknowledged.items()
        for number in range(each.begun + 1)
    }
    places = {agent: each.places for agent, each in acknowledged.items()}
    ids = list(expected)
    rows = {row.rollout_id: row for row in store.rollouts(limit=None)}
    found.faults += [f"rollout {name}: nobody made it" for name in rows.keys() - expected.keys()]
    for start in range(0, len(ids), _AT_ONCE):
        for name, stored in _read(store, rows, ids[start : start + _AT_ONCE]):
            _compare(found, name, stored, expected[name], places)
    found.faults += _ends_told_twice(store, rows)
    found.faults += integrity(store)
    return found


def _wait_for_killed_clients(store: Store) -> None:
    """A server may still be at the commit of a client that was killed."""
    others = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'"
    )
    deadline = time.monotonic() + 30
    while store.database.url.get_backend_name() == "postgresql":
        with store.reading() as connection:
            if not connection.scalar(others):
                return
        assert time.monotonic() < deadline, "transactions of the dead do not end"
        time.sleep(0.02)


def _read(
    store: Store, rows: Mapping[str, RolloutSummary], ids: Sequence[str]
) -> Iterable[tuple[str, _Stored]]:
    with store.reading() as connection:
        turns = load_turns(connection, ids)
        rewards = load_rewards(connection, ids)
        spans = load_spans(connection, ids)
        for name in ids:
            yield (
                name,
                _Stored(
                    rows.get(name),
                    {turn.turn_id: turn for turn in turns[name]},
                    {reward.reward_id: reward for reward in rewards[name]},
                    {span.span_id: span for span in spans[name]},
                ),
            )


def _compare(
    found: DurabilityReport,
    name: str,
    stored: _Stored,
    made: Sequence[Sequence[Submission]],
    acknowledged: Mapping[str, set[tuple[int, int, int]]],
) -> None:
    strange = {*stored.turns, *stored.rewards, *stored.spans}
    for parcel in (parcel for wave in made for parcel in wave):
        has = [stored.has(event) for event in parcel.events]
        strange -= {_id(event) for event in parcel.events}
        if parcel.place in acknowledged[parcel.agent]:
            found.acknowledged += 1
            if has != [True] * len(has):
                found.faults.append(f"acknowledged, and not kept: {_listed(parcel, has)}")
        elif all(has):
            found.unacknowledged["whole"] += 1
        elif any(each is not False for each in has):
            found.faults.append(f"half of it is there: {_listed(parcel, has)}")
        else:
            found.unacknowledged["absent"] += 1
    found.faults += [f"{each} of rollout {name}: nobody sent it" for each in sorted(strange)]
    found.faults += [
        f"turn {turn.turn_id} is there, and its parent {turn.parent_id} is not"
        for turn in stored.turns.values()
        if turn.parent_id is not None and turn.parent_id not in stored.turns
    ]
    if stored.turns and stored.row is None:
        found.faults.append(f"rollout {name} is not there, and turns of it are")
    found.turns += len(stored.turns)


def _id(event: Event) -> str:
    match event:
        case Turn():
            return event.turn_id
        case Reward():
            return event.reward_id
        case Span():
            return event.span_id
        case _:
            return type(event).__name__


def _listed(parcel: Submission, has: Sequence[bool | None]) -> str:
    words = {True: "whole", False: "absent", None: "changed"}
    events = (
        f"{type(event).__name__} {_id(event)} {words[each]}"
        for event, each in zip(parcel.events, has, strict=True)
    )
    return f"submission {parcel}: {', '.join(events)}"


def _ends_told_twice(store: Store, rows: Mapping[str, RolloutSummary]) -> list[str]:
    with store.reading() as connection:
        ends = Counter(connection.scalars(select(Outcomes.rollout_id)))
    ended = {name for name, row in rows.items() if row.outcome is not None}
    faults = [
        f"rollout {name}: its row and its ends contradict each other"
        for name in ended.symmetric_difference(ends)
    ]
    return faults + [
        f"rollout {name}: its end is there {times} times"
        for name, times in ends.items()
        if times > 1
    ]


def integrity(store: Store) -> list[str]:
    """What the database itself finds wrong in its files."""
    with store.exclusive() as connection:
        if connection.dialect.name == "sqlite":
            lines = connection.scalars(text("PRAGMA integrity_check")).all()
            broken = connection.execute(text("PRAGMA foreign_key_check")).all()
            return [f"integrity_check: {each}" for each in lines if each != "ok"] + [
                f"foreign_key_check: {each}" for each in broken
            ]
        connection.execute(text("CREATE EXTENSION IF NOT EXISTS amcheck"))
        heaps = connection.execute(text(_HEAPS)).all()
        connection.execute(text(_INDEXES)).all()  # raises for one that is broken, or lacks a row
        return [f"verify_heapam: {each}" for each in heaps]

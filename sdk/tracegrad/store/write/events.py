"""Events into rows, inside the caller's transaction. Writing an event again changes nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, bindparam, func, null, select, true, update
from sqlalchemy.orm import aliased

from tracegrad.events import (
    OVER_LENGTH,
    REWARD_RANGE,
    UNACKNOWLEDGED,
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutInferred,
    RolloutStarted,
    Span,
    Turn,
    is_reward,
)
from tracegrad.store.databases import Conflict, insert_new
from tracegrad.store.encoding.shared_texts import add_links, add_texts
from tracegrad.store.errors import EventRejected, RolloutTaken
from tracegrad.store.models import Outcomes, Rewards, Rollouts, RolloutTags, Spans, Turns
from tracegrad.store.rows import chunks, column_values, rows_of_keys
from tracegrad.store.write.parent_cache import KnownParents, ParentInfo, load_parents
from tracegrad.store.write.turn_rows import ColumnValues, TurnRows, make_turn_rows

# PostgreSQL's indexes take rows of 2,700 bytes; one of ours holds a tag and its rollout's id.
_MAX_ID_LENGTH, _MAX_NAME_LENGTH = 512, 2048  # bytes

# Built once: making a statement costs more than running it.
_HELD = (
    select(Rollouts.rollout_id, Rollouts.opened)
    .where(Rollouts.rollout_id.in_(bindparam("ids", expanding=True)))
    .order_by(Rollouts.rollout_id)
    .with_for_update(key_share=True)  # turns may be added to them
)
# An opening that names no task leaves the one that a rollout was grouped by (`add_scorings`).
_OPENING = (
    update(Rollouts)
    .where(Rollouts.rollout_id == bindparam("which"))
    .values(
        opened=true(),
        task_id=func.coalesce(
            bindparam("given_task_id", type_=Rollouts.task_id.type), Rollouts.task_id
        ),
    )
)
# What somebody reports counts before what was inferred, until training has taken the rollout.
_FINISHING = (
    update(Rollouts)
    .where(
        Rollouts.rollout_id == bindparam("which"),
        Rollouts.finished_at.is_(None)
        | (
            Rollouts.idle_s.is_not(None)
            & Rollouts.lease_id.is_(None)
            & Rollouts.consumed_at.is_(None)
        ),
    )
    .values(idle_s=null())
)
# Held for the change that follows, and to wait for a lease that is being given.
_IDLE_ENDS = (
    select(Rollouts.rollout_id, Rollouts.lease_id, Rollouts.consumed_at, Rollouts.idle_s)
    .where(Rollouts.idle_s.is_not(None))
    .order_by(Rollouts.rollout_id)
    .with_for_update(key_share=True)
)
_IDLE_END_OF = _IDLE_ENDS.where(Rollouts.rollout_id == bindparam("which"))
_IDLE_ENDS_OF = _IDLE_ENDS.where(Rollouts.rollout_id.in_(bindparam("ids", expanding=True)))
_REOPENING = (
    update(Rollouts)
    .where(Rollouts.rollout_id.in_(bindparam("ids", expanding=True)))
    .values(outcome=null(), error=null(), finished_at=null(), idle_s=null())
)


class NewRows(NamedTuple):
    """How many rewards and spans of a batch were not stored yet."""

    rewards: int
    spans: int


class TurnAlreadyStored(Conflict):
    """A turn that was to be new is stored already."""


@dataclass
class EventBatch:
    """Events by kind, in order; of turns with the same id the first."""

    first_seen: dict[str, float] = field(default_factory=dict)
    opened: list[RolloutStarted] = field(default_factory=list)
    inferred: dict[str, str | None] = field(default_factory=dict)  # -> which one it continues
    finished: list[RolloutFinished] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)

    def note_rollout(self, rollout_id: str, at: float) -> None:
        if not rollout_id:
            raise EventRejected("rollout_id: it is empty")
        check_length("rollout_id", rollout_id)
        self.first_seen[rollout_id] = min(at, self.first_seen.get(rollout_id, at))


def sort_events(events: Iterable[Event]) -> EventBatch:
    """Raises `EventRejected` for an event without a rollout's name, or with names that are too
    long."""
    batch = EventBatch()
    for event in events:
        match event:
            case RolloutStarted():
                batch.note_rollout(event.rollout_id, event.opened_at)
                check_length("task_id", event.task_id or "", _MAX_NAME_LENGTH)
                for key, value in event.tags.items():
                    check_length(f"tags: {key!r:.40}", f"{key}{value}", _MAX_NAME_LENGTH)
                batch.opened.append(event)
            case RolloutInferred():
                batch.inferred[event.rollout_id] = event.continues
            case RolloutFinished():
                batch.note_rollout(event.rollout_id, _ended_at(event))
                batch.finished.append(event)
            case Reward():
                batch.note_rollout(event.rollout_id, event.created_at)
                check_length("reward_id", event.reward_id)
                batch.rewards.append(event)
            case Span():
                if event.rollout_id is not None:
                    batch.note_rollout(event.rollout_id, min(event.start_ns / 1e9, time.time()))
                check_length("trace_id", event.trace_id)
                check_length("span_id", event.span_id)
                batch.spans.append(event)
            case Turn():
                batch.note_rollout(event.rollout_id, event.created_at)
                check_length("turn_id", event.turn_id)
                batch.turns.setdefault(event.turn_id, event)
    return batch


def check_length(field: str, name: str, most: int = _MAX_ID_LENGTH) -> None:
    """Of what is looked up in an index. Raises `EventRejected`."""
    if len(name) * 4 > most and (length := len(name.encode("utf-8", "replace"))) > most:
        raise EventRejected(f"{field}: {length} bytes; give at most {most}")


def add_rollouts(connection: Connection, batch: EventBatch, rollout_ids: Iterable[str]) -> None:
    """Those that are not stored yet, bare. In order: who adds some of them too waits, instead of
    being waited for."""
    _insert(
        connection,
        Rollouts,
        [
            {
                "rollout_id": name,
                "opened": False,
                "opened_at": batch.first_seen[name],
                "continues": batch.inferred.get(name),
            }
            for name in sorted(rollout_ids)
        ],
    )


def lock_rollouts(connection: Connection, rollout_ids: Iterable[str]) -> None:
    """Nobody else changes them, or adds turns to them, until the transaction ends."""
    for ids in chunks(sorted(rollout_ids)):
        query = select(Rollouts.rollout_id).where(Rollouts.rollout_id.in_(ids))
        connection.execute(query.order_by(Rollouts.rollout_id).with_for_update())


def rows_from_store(
    connection: Connection, batch: EventBatch
) -> tuple[TurnRows, dict[str, ParentInfo]]:
    """The rows of the batch's turns that are new, and the stored ones among its turns and their
    parents. Its rollouts are there, and held, from here to the end of the transaction.

    Raises EventRejected for a turn that contradicts its parent.
    """
    add_rollouts(connection, batch, batch.first_seen)
    lock_rollouts(connection, batch.first_seen)
    known = load_parents(connection, batch.turns)
    new = [turn for turn_id, turn in batch.turns.items() if turn_id not in known]
    known |= load_parents(connection, {turn.parent_id for turn in new if turn.parent_id})
    rows, _ = make_turn_rows(new, KnownParents(known))
    return rows, known


def write_batch(
    connection: Connection,
    batch: EventBatch,
    rows: TurnRows,
    new_rollouts: Iterable[str],
) -> NewRows:
    """`rows` are those of the batch's turns that are new (`turn_rows.make_turn_rows`),
    `new_rollouts` those of its rollouts that may be.

    Raises `TurnAlreadyStored` if one of them is not, `EventRejected` for an event that contradicts
    itself, `RolloutTaken` for a turn whose rollout was inferred and is training's by now.
    """
    add_rollouts(connection, batch, new_rollouts)
    changed = {f.rollout_id for f in batch.opened} | {f.rollout_id for f in batch.finished}
    bare = _lock_unopened(connection, changed)
    opened = _open(connection, batch.opened, bare)
    if _insert(connection, Turns, rows.turns) != len(rows.turns):
        raise TurnAlreadyStored("turns of the batch are being written by others too; try again")
    # Now that their turns refer to them nobody closes them until we have committed.
    _reopen(connection, opened | {row["rollout_id"] for row in rows.turns}, batch.inferred)
    # After the turns: who waits for a rollout holds no text that others wait for.
    add_texts(connection, rows.texts)
    add_links(connection, rows.links)
    _finish(connection, batch.finished)
    rewards = add_rewards(connection, batch.rewards)
    spans = _insert(connection, Spans, [_span_row(span) for span in batch.spans])
    _adopt_spans(connection, batch.spans)
    return NewRows(rewards, spans)


def mark_unacknowledged(connection: Connection, turn_ids: Sequence[str]) -> int:
    """Turns whose clients were refused are not trained. How many of them there were and could be;
    others are not there, or have a reason already."""
    marked = 0
    for ids in chunks(turn_ids):
        found = Turns.turn_id.in_(ids) & Turns.untrainable.is_(None)
        query = update(Turns).where(found).values(untrainable=UNACKNOWLEDGED)
        marked += connection.execute(query).rowcount
    return marked


def clear_unacknowledged(connection: Connection, turn_ids: Sequence[str]) -> list[str]:
    """Turns that were marked, and whose writers have come again. Those that were."""
    cleared: list[str] = []
    for ids in chunks(turn_ids):
        found = Turns.turn_id.in_(ids) & (Turns.untrainable == UNACKNOWLEDGED)
        query = update(Turns).where(found).values(untrainable=None).returning(Turns.turn_id)
        cleared += connection.scalars(query)
    return cleared


def _insert(connection: Connection, table: Any, rows: Sequence[ColumnValues]) -> int:
    """How many were new."""
    if not rows:
        return 0
    # Of inserts SQLAlchemy forgets the count, unless it is asked to keep it.
    wanted = {"preserve_rowcount": True}
    return connection.execute(
        insert_new(connection, table), rows, execution_options=wanted
    ).rowcount


def _lock_unopened(connection: Connection, rollout_ids: Iterable[str]) -> set[str]:
    """Those without an opening. All of them are held, in order: others that open or end some of
    them wait, and then see what we wrote."""
    bare: set[str] = set()
    for ids in chunks(sorted(rollout_ids)):
        rows = connection.execute(_HELD, {"ids": ids})
        bare.update(rollout_id for rollout_id, opened in rows if not opened)
    return bare


def _open(connection: Connection, events: Sequence[RolloutStarted], bare: set[str]) -> set[str]:
    """Those that were not open before."""
    # Of several openings of one rollout the first counts, here and in the table.
    first = {event.rollout_id: event for event in reversed(events)}
    new = [event for event in first.values() if event.rollout_id in bare]
    if not new:
        return set()
    connection.execute(
        _OPENING,
        [
            {
                "which": event.rollout_id,
                "opened_at": event.opened_at,
                "given_task_id": event.task_id,
                "agent": event.agent,
                "task": event.task,
                "held_out": event.held_out,
            }
            for event in new
        ],
    )
    _insert(connection, RolloutTags, [row for event in new for row in tag_rows(event)])
    return {event.rollout_id for event in new}


def _reopen(
    connection: Connection, rollout_ids: Collection[str], inferred: Collection[str]
) -> None:
    """Those that were closed because they were idle, and are not: they have a new turn, or
    somebody to end them.

    One that is leased or consumed stays closed, since its turns of the lease are being trained or
    were: what comes after them is not, and the ledger counts it as late. If it was only `inferred`
    to belong there, it is refused instead. A lease that ran out counts as one: its trainer may yet
    commit, until another has taken the rollout or it is given back.

    Raises RolloutTaken.
    """
    free: list[str] = []
    for name, lease_id, consumed_at, idle_s in _idle_ends(connection, rollout_ids):
        if lease_id is None and consumed_at is None:
            free.append(name)
        elif name in inferred:
            raise RolloutTaken(
                f"rollout_id: {name} was closed after {idle_s:g} s without a call, and training"
                " has taken it; let the turn begin another rollout that continues it"
            )
    for ids in chunks(free):
        connection.execute(_REOPENING, {"ids": ids})


def _idle_ends(
    connection: Connection, rollout_ids: Collection[str]
) -> Iterator[Row[str, str | None, float | None, float | None]]:
    if len(rollout_ids) == 1:  # as of most calls; a list of ids costs several times as much
        [only] = rollout_ids
        yield from connection.execute(_IDLE_END_OF, {"which": only})
        return
    for ids in chunks(sorted(rollout_ids)):
        yield from connection.execute(_IDLE_ENDS_OF, {"ids": ids})


def tag_rows(event: RolloutStarted) -> list[ColumnValues]:
    return [
        {"rollout_id": event.rollout_id, "key": key, "value": str(value), "position": position}
        for position, (key, value) in enumerate(event.tags.items())
    ]


def _finish(connection: Connection, events: Sequence[RolloutFinished]) -> None:
    """Of several ends of one rollout the first counts.

    An agent that crashed right after its context was full has used up its budget. Its last turn
    is stored before its end: it crashed on the refusal, which it gets after the commit.
    """
    if not events:
        return
    _insert(
        connection,
        Outcomes,
        [
            {**column_values(event, Outcomes), "outcome": Outcome(event.outcome).value}
            for event in events
        ],
    )
    crashed = [f.rollout_id for f in events if f.outcome == Outcome.AGENT_ERROR]
    full = _over_length(connection, crashed)
    connection.execute(
        _FINISHING,
        [
            {
                "which": event.rollout_id,
                "outcome": (
                    Outcome.BUDGET
                    if event.outcome == Outcome.AGENT_ERROR and event.rollout_id in full
                    else Outcome(event.outcome)
                ).value,
                "error": event.error,
                "finished_at": _ended_at(event),
            }
            for event in events
        ],
    )


def _ended_at(event: RolloutFinished) -> float:
    return event.finished_at if event.recorded_at is None else event.recorded_at


def _over_length(connection: Connection, rollout_ids: Sequence[str]) -> set[str]:
    """Those whose last turn was refused because its prompt is over the engine's context."""
    full = set()
    for rollout_id in rollout_ids:
        last = (
            select(Turns.untrainable)
            .where(Turns.rollout_id == rollout_id)
            .order_by(Turns.seq.desc())
            .limit(1)
        )
        if connection.scalar(last) == OVER_LENGTH:
            full.add(rollout_id)
    return full


def add_rewards(connection: Connection, events: Sequence[Reward]) -> int:
    """Of rollouts that are stored. How many were new. Raises EventRejected."""
    rows = [_reward_row(event) for event in events]
    if (new := _insert(connection, Rewards, rows)) == len(rows):
        return new
    # Sent again, most likely. One that another rollout has would be lost without a word.
    whose = {event.reward_id: event.rollout_id for event in reversed(events)}
    query = select(Rewards.reward_id, Rewards.rollout_id)
    for reward_id, rollout_id in rows_of_keys(connection, query, Rewards.reward_id, whose):
        if whose[reward_id] != rollout_id:
            raise EventRejected(
                f"reward_id: {reward_id} is a reward of rollout {rollout_id}; give the one of"
                f" rollout {whose[reward_id]} another id"
            )
    return new


def _reward_row(event: Reward) -> ColumnValues:
    if event.value is not None and not is_reward(event.value):
        raise EventRejected(
            f"value: reward {event.name!r} of rollout {event.rollout_id} is {event.value}; "
            f"give {REWARD_RANGE}"
        )
    if event.turn is not None:
        _check_integer("turn", event.turn)
    value = None if event.value is None else float(event.value)
    return {**column_values(event, Rewards), "value": value}


def _check_integer(field: str, value: int) -> None:
    if not -(2**63) <= value < 2**63:
        raise EventRejected(f"{field}: {value} is more than 64 bits")


def _span_row(event: Span) -> ColumnValues:
    _check_integer("start_ns", event.start_ns)
    _check_integer("end_ns", event.end_ns)
    return column_values(event, Spans)


def _adopt_spans(connection: Connection, spans: Iterable[Span]) -> None:
    """Earlier spans of a trace that came before anybody knew its rollout join it now.

    Not where spans of the trace are in several rollouts: one of those around them all may be
    nobody's.
    """
    pairs = {(span.trace_id, span.rollout_id) for span in spans if span.rollout_id is not None}
    if not pairs:
        return
    other = aliased(Spans)
    elsewhere = select(other.span_id).where(
        other.trace_id == bindparam("trace"), other.rollout_id != bindparam("rollout")
    )
    connection.execute(
        update(Spans)
        .where(
            Spans.trace_id == bindparam("trace"),
            Spans.rollout_id.is_(None),
            ~elsewhere.exists(),
        )
        .values(rollout_id=bindparam("rollout")),
        [{"trace": trace_id, "rollout": rollout_id} for trace_id, rollout_id in sorted(pairs)],
    )

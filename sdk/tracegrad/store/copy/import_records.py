"""Copies into a store: what it has already stays as it is, what it lacks is added.

Rollouts, turns, rewards and spans are distinguished by the ids that their makers gave them. Steps
and policy versions have only numbers: one whose number is taken by another is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, bindparam, exc, insert, select, update

from tracegrad.events import Event, RolloutStarted, Span
from tracegrad.store.copy.export_records import RolloutRecord, VersionRecord
from tracegrad.store.databases import insert_new
from tracegrad.store.encoding.blobs import ContextDigest
from tracegrad.store.errors import EventRejected
from tracegrad.store.models import PolicyVersions, Rollouts, Steps, TurnLedger, VersionEvents
from tracegrad.store.read.rollouts import version_events
from tracegrad.store.retry import retry_on_conflict
from tracegrad.store.rows import column_values, rows_of_keys
from tracegrad.store.store import Store
from tracegrad.store.types import StepRecord
from tracegrad.store.write.events import rows_from_store, sort_events, write_batch
from tracegrad.store.write.turn_rows import TurnRows

_IMPORT_ELSEWHERE = "import it into a store of its own, or with --untrained"


@dataclass(slots=True)
class ImportCounts:
    """How many were new; `known` rollouts were here before."""

    rollouts: int = 0
    known: int = 0
    turns: int = 0
    rewards: int = 0
    spans: int = 0
    steps: int = 0
    versions: int = 0

    def add(self, other: ImportCounts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def import_rollouts(store: Store, copies: Sequence[RolloutRecord]) -> ImportCounts:
    """All of them in one transaction. Raises `EventRejected`, and then stores none of them."""
    try:
        return retry_on_conflict(lambda: _add_rollouts(store, copies))
    except exc.IntegrityError as error:
        reason = " ".join(str(error.orig).split())
        raise EventRejected(f"rollout_id: it refers to what is not stored ({reason})") from error


def opening_times(store: Store, rollout_ids: Sequence[str]) -> dict[str, float]:
    """Of those rollouts that are here."""
    query = select(Rollouts.rollout_id, Rollouts.opened_at)
    with store.reading() as connection:
        return dict(rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids))


def import_steps(store: Store, steps: Sequence[StepRecord]) -> ImportCounts:
    """Raises `EventRejected` where a step of the same number is another one; stores none then."""
    query = select(Steps.step, Steps.version, Steps.created_at)
    with store.exclusive() as connection:
        rows = rows_of_keys(connection, query, Steps.step, [step.step for step in steps])
        known = {number: (version, created_at) for number, version, created_at in rows}
        for step in steps:
            here = known.get(step.step)
            if here is not None and here != (step.version, step.created_at):
                raise EventRejected(
                    f"step: the store has another step {step.step}; {_IMPORT_ELSEWHERE}"
                )
        new = [column_values(step, Steps) for step in steps if step.step not in known]
        if new:
            connection.execute(insert(Steps), new)
    return ImportCounts(steps=len(new))


def import_versions(store: Store, versions: Sequence[VersionRecord]) -> ImportCounts:
    """Raises `EventRejected` where a version of the same number is another one; stores none
    then."""
    with store.exclusive() as connection:
        return ImportCounts(versions=sum(_add_version(connection, version) for version in versions))


def import_spans(store: Store, spans: Sequence[Span]) -> ImportCounts:
    """Spans that belong to no rollout."""
    with store.exclusive() as connection:
        new = write_batch(connection, sort_events(spans), TurnRows(), [])
    return ImportCounts(spans=new.spans)


def _add_rollouts(store: Store, copies: Sequence[RolloutRecord]) -> ImportCounts:
    batch = sort_events(event for copy in copies for event in _events(copy))
    for copy in copies:
        batch.note_rollout(copy.rollout_id, copy.opened_at)
    with store.exclusive() as connection:
        here = _known_rollouts(connection, copies)
        # Nobody removes turns meanwhile: that takes an exclusive transaction too.
        rows, known = rows_from_store(connection, batch)
        _refuse_other_turns(copies, known)
        fresh = [copy for copy in copies if copy.rollout_id not in here]
        new = write_batch(connection, batch, rows, new_rollouts=())
        _copy_rollout_columns(connection, fresh)
        _consume(connection, [copy for copy in copies if copy.rollout_id in here])
        _insert_dispositions(connection, copies)
    return ImportCounts(
        rollouts=len(fresh),
        known=len(copies) - len(fresh),
        turns=len(rows.turns),
        rewards=new.rewards,
        spans=new.spans,
    )


def _events(copy: RolloutRecord) -> list[Event]:
    """In the order in which they make sense: turns before ends, parents before children."""
    opening = {each.name: getattr(copy, each.name) for each in fields(RolloutStarted)}
    return [
        *([RolloutStarted(**opening)] if copy.opened else []),
        *copy.turns,
        *copy.rewards,
        *copy.spans,
        *copy.outcomes,
    ]


def _known_rollouts(connection: Connection, copies: Sequence[RolloutRecord]) -> set[str]:
    """Raises EventRejected for one that is another rollout here."""
    openings = {copy.rollout_id: copy for copy in copies}
    known: set[str] = set()
    query = select(Rollouts.rollout_id, Rollouts.opened, Rollouts.opened_at, Rollouts.task_id)
    for row in rows_of_keys(connection, query, Rollouts.rollout_id, openings):
        copy = openings[row.rollout_id]
        known.add(row.rollout_id)
        same = (row.opened_at, row.task_id) == (copy.opened_at, copy.task_id)
        if row.opened and copy.opened and not same:
            raise EventRejected(
                f"rollout_id: the store has another rollout {row.rollout_id} (of task "
                f"{row.task_id}, opened at {row.opened_at}); give this one another id"
            )
    return known


def _refuse_other_turns(copies: Sequence[RolloutRecord], known: dict[str, Any]) -> None:
    for turn in (turn for copy in copies for turn in copy.turns):
        if (context := known.get(turn.turn_id)) is None:
            continue
        digest = ContextDigest().add(turn.prompt_token_ids).add(turn.completion_token_ids)
        if (context.rollout_id, context.digest) != (turn.rollout_id, digest.value()):
            raise EventRejected(
                f"turn_id: the store has another turn {turn.turn_id} (of rollout "
                f"{context.rollout_id}); give this one another id"
            )


def _copy_rollout_columns(connection: Connection, copies: Sequence[RolloutRecord]) -> None:
    """How new rollouts stand: as they stood where they came from."""
    if not copies:
        return
    connection.execute(
        update(Rollouts).where(Rollouts.rollout_id == bindparam("which")),
        [
            {
                "which": copy.rollout_id,
                "opened_at": copy.opened_at,
                "outcome": copy.outcome,
                "error": copy.error,
                "finished_at": copy.finished_at,
                "consumed_at": copy.consumed_at,
                "consumed_step": copy.consumed_step,
                "idle_s": copy.idle_s,
                "continues": copy.continues,
            }
            for copy in copies
        ],
    )


def _consume(connection: Connection, copies: Sequence[RolloutRecord]) -> None:
    """Rollouts that were here, and were consumed where the copy was made."""
    consumed = [
        {
            "which": copy.rollout_id,
            "consumed_at": copy.consumed_at,
            "consumed_step": copy.consumed_step,
        }
        for copy in copies
        if copy.consumed_at is not None
    ]
    if consumed:
        here = (Rollouts.rollout_id == bindparam("which"), Rollouts.consumed_at.is_(None))
        connection.execute(update(Rollouts).where(*here), consumed)


def _insert_dispositions(connection: Connection, copies: Sequence[RolloutRecord]) -> None:
    rows = [
        {"turn_id": turn_id, **column_values(fate, TurnLedger)}
        for copy in copies
        for turn_id, fate in copy.dispositions.items()
    ]
    if rows:
        connection.execute(insert_new(connection, TurnLedger), rows)


def _add_version(connection: Connection, version: VersionRecord) -> bool:
    """Whether anything of it was new."""
    number = version.current.version
    here = version_events(connection, number)
    standing = select(PolicyVersions.created_at).where(PolicyVersions.version == number)
    since = connection.scalar(standing)
    theirs = list(version.events)
    # One history goes on where the other ends, or it is another version's.
    if here[: len(theirs)] != theirs[: len(here)] or (
        since is not None and not here and since != version.current.created_at
    ):
        raise EventRejected(f"version: the store has another version {number}; {_IMPORT_ELSEWHERE}")
    new = theirs[len(here) :]
    if new:
        connection.execute(
            insert(VersionEvents), [column_values(event, VersionEvents) for event in new]
        )
    if since is None:
        connection.execute(insert(PolicyVersions), column_values(version.current, PolicyVersions))
    elif new:
        row = column_values(version.current, PolicyVersions)
        connection.execute(
            update(PolicyVersions).where(PolicyVersions.version == number).values(row)
        )
    return bool(new) or since is None

"""Whether what became of rollouts, turns, steps and versions adds up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Connection, exists, func, not_, select

from tracegrad.events import MAX_REWARD, REWARD_RANGE
from tracegrad.store.databases import statements
from tracegrad.store.expressions import has_turns
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.maintenance.removal_log import total_removed
from tracegrad.store.maintenance.selection import last_activity
from tracegrad.store.models import (
    PolicyVersions,
    Rewards,
    RolloutKeys,
    Rollouts,
    Steps,
    TurnLedger,
    Turns,
    VersionEvents,
)
from tracegrad.store.read.call_counts import count_calls
from tracegrad.store.rows import count_rows
from tracegrad.text_format import format_count, format_elapsed

DAY_S = 86_400.0
# A rollout without an end and without a turn for so long is taken for left behind, and a key of a
# rollout that nobody has heard of for so long for never used.
OPEN_S, KEY_S = DAY_S, 7 * DAY_S
# What a proxy says before the first push: the weights that the engine started with.
_FIRST_VERSION = 0


def ledger_checks(connection: Connection) -> Iterator[Finding]:
    now = time.time()
    yield from _leases(connection, statements.server_time(connection))
    yield from _unconsumed(connection)
    yield from _open_for_long(connection, now)
    yield from _without_turns(connection)
    yield from _keys(connection, now)
    yield from _rewards(connection)
    yield from _gaps(connection, "steps", Steps.step)
    yield from _gaps(connection, "versions", PolicyVersions.version)
    yield from _never_served(connection)
    yield from _steps_without_turns(connection)
    yield from _sums(connection)


def expired(now: float) -> ColumnElement[bool]:
    """Of `Rollouts`: leased until a time that has passed, by somebody who did not say more."""
    return (Rollouts.leased_until <= now) & Rollouts.consumed_at.is_(None)


def unconsumed() -> ColumnElement[bool]:
    """Of `Rollouts`: a step trained on turns of theirs, and they wait all the same."""
    trained = (
        exists()
        .where(Turns.rollout_id == Rollouts.rollout_id)
        .where(TurnLedger.turn_id == Turns.turn_id, TurnLedger.step.is_not(None))
    )
    return Rollouts.consumed_at.is_(None) & trained


def unknown_keys(now: float) -> ColumnElement[bool]:
    """Of `RolloutKeys`."""
    known = exists().where(Rollouts.rollout_id == RolloutKeys.rollout_id)
    return not_(known) & (RolloutKeys.created_at < now - KEY_S)


def _leases(connection: Connection, now: float) -> Iterator[Finding]:
    query = (
        select(
            Rollouts.lease_owner, Rollouts.lease_id, func.count(), func.max(Rollouts.leased_until)
        )
        .where(expired(now))
        .group_by(Rollouts.lease_owner, Rollouts.lease_id)
        .order_by(func.max(Rollouts.leased_until))
    )
    for owner, lease_id, count, until in connection.execute(query):
        yield Finding(
            check="leases",
            subject=f"lease {lease_id}",
            message=f"{owner} held {count} rollouts and let the lease run out "
            f"{format_elapsed(now - (until or now))} ago: it ended, or is stuck",
            fix="nothing is lost: others can lease them. tracegrad doctor --fix gives them back",
            broken=False,
            count=count,
        )


def _unconsumed(connection: Connection) -> Iterator[Finding]:
    for rollout_id in connection.scalars(select(Rollouts.rollout_id).where(unconsumed())):
        yield Finding(
            check="consumed",
            subject=f"rollout {rollout_id}",
            message="a step trained on its turns, and it waits to be trained: every step that "
            "takes it will be refused",
            fix="tracegrad doctor --fix marks it as consumed",
        )


def _open_for_long(connection: Connection, now: float) -> Iterator[Finding]:
    left = (Rollouts.finished_at.is_(None), Rollouts.opened, last_activity() < now - OPEN_S)
    if count := count_rows(connection, Rollouts, *left):
        oldest = select(Rollouts.rollout_id).where(*left).order_by(Rollouts.opened_at).limit(1)
        yield Finding(
            check="open",
            subject=f"rollout {connection.scalar(oldest)}",
            message=f"{count} rollouts have no end, and nothing happened in them for a day",
            fix="their agents ended without saying so: finish them (POST /api/events), or "
            "tracegrad prune --outcome open --older-than 1d --also-untrained",
            broken=False,
            count=count,
        )


def _without_turns(connection: Connection) -> Iterator[Finding]:
    rewarded = exists().where(Rewards.rollout_id == Rollouts.rollout_id)
    undecided = Rollouts.finished_at.is_not(None) & Rollouts.consumed_at.is_(None)
    empty = (undecided, rewarded, ~has_turns())
    if count := count_rows(connection, Rollouts, *empty):
        newest = select(Rollouts.rollout_id).where(*empty)
        newest = newest.order_by(Rollouts.opened_at.desc()).limit(1)
        [example] = count_calls(connection, connection.scalars(newest).all())
        unnamed = format_count(example.unnamed_calls, "call")
        meanwhile = f"; {unnamed} that named no rollout came while the newest of them was open"
        yield Finding(
            check="no_turns",
            subject=f"rollout {example.rollout_id}",
            message=f"{count} rollouts have a reward and not a single call: no group counts them"
            f"{meanwhile if example.unnamed_calls else ''}",
            fix="their agents called past the proxy, or named another rollout: give their clients "
            "the rollout's base URL or key (docs/agents.md)",
            broken=False,
            count=count,
        )


def _keys(connection: Connection, now: float) -> Iterator[Finding]:
    if count := count_rows(connection, RolloutKeys, unknown_keys(now)):
        yield Finding(
            check="keys",
            message=f"{count} keys were made a week ago or earlier for rollouts that never came",
            fix="tracegrad doctor --fix takes them out",
            broken=False,
            count=count,
        )


def _rewards(connection: Connection) -> Iterator[Finding]:
    # Neither an infinity nor PostgreSQL's NaN, which is above everything, is between these.
    bounded = Rewards.value.between(-MAX_REWARD, MAX_REWARD)
    query = select(Rewards.reward_id, Rewards.rollout_id, Rewards.value).where(not_(bounded))
    for reward_id, rollout_id, value in connection.execute(query):
        yield Finding(
            check="rewards",
            subject=f"rollout {rollout_id}",
            message=f"reward {reward_id} is {value}: it does not count",
            fix=f"give the rollout {REWARD_RANGE} in its place (POST /api/events)",
        )


def _gaps(connection: Connection, check: str, number: Any) -> Iterator[Finding]:
    numbers = list(connection.scalars(select(number).order_by(number)))
    for before, after in pairwise(numbers):
        if after != before + 1:
            missing = str(before + 1) if after == before + 2 else f"{before + 1} to {after - 1}"
            yield Finding(
                check=check,
                subject=f"{check} {missing}",
                message=f"{before} is followed by {after}",
                fix="harmless after a rollback or a restore of the trainer's checkpoints; else "
                "rows were deleted: restore the last good copy of the store",
                broken=False,
            )


def _never_served(connection: Connection) -> Iterator[Finding]:
    served = set(
        connection.scalars(
            select(VersionEvents.version)
            .where(VersionEvents.state == "serving")
            .union(select(PolicyVersions.version).where(PolicyVersions.state == "serving"))
        )
    )
    if not served:
        return  # nobody pushes weights to the engine
    # The trainer skips those of a push that failed; what it skipped trains nothing.
    known = (
        select(Turns.last_version, func.count())
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .where(Turns.last_version.is_not(None), TurnLedger.skip_reason.is_(None))
        .group_by(Turns.last_version)
    )
    for version, count in connection.execute(known):
        if version not in served and version != _FIRST_VERSION:
            yield Finding(
                check="versions",
                subject=f"version {version}",
                message=f"{count} turns were sampled by it, and it never served",
                fix="their log-probabilities may be another model's: train with a correction, or "
                f"let them go: tracegrad prune --min-version {version} --max-version {version} "
                "--also-untrained",
                count=count,
            )


def _steps_without_turns(connection: Connection) -> Iterator[Finding]:
    removed = total_removed(connection).get("steps", {})
    used = exists().where(Rollouts.consumed_step == Steps.step)
    query = (
        select(Steps.step, used)
        .outerjoin(TurnLedger, TurnLedger.step == Steps.step)
        .where(TurnLedger.turn_id.is_(None))
        .order_by(Steps.step)
    )
    for step, used_here in connection.execute(query):
        if used_here:
            yield Finding(
                check="steps",
                subject=f"step {step}",
                message="the ledger has none of the turns that it trained on, and their rollouts "
                "are here",
                fix="restore the last good copy of the store: which turns were trained is lost",
            )
        elif str(step) not in removed:
            yield Finding(
                check="steps",
                subject=f"step {step}",
                message="none of the turns that it trained on is here, and no removal took them",
                fix="harmless if the store was imported from one that had been pruned; else rows "
                "were deleted: restore the last good copy of the store",
                broken=False,
            )


def _sums(connection: Connection) -> Iterator[Finding]:
    """Captured = trained + skipped + pending, each counted by itself."""
    captured = count_rows(connection, Turns)
    trained = count_rows(connection, TurnLedger, TurnLedger.step.is_not(None))
    skipped = count_rows(connection, TurnLedger, TurnLedger.skip_reason.is_not(None))
    decided = exists().where(TurnLedger.turn_id == Turns.turn_id)
    placed = exists().where(Rollouts.rollout_id == Turns.rollout_id)
    pending = count_rows(connection, Turns, placed, ~decided)
    if captured != trained + skipped + pending:
        yield Finding(
            check="sums",
            message=f"{captured:,} turns are stored, and {trained:,} trained + {skipped:,} "
            f"skipped + {pending:,} pending are {trained + skipped + pending:,}",
            fix="look at what else was found, orphans above all",
        )

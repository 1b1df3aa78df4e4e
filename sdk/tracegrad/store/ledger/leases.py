"""Which rollouts are ready to be trained on, how they form groups, and who has them meanwhile.

Everything here happens inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from tracegrad.events import Outcome
from tracegrad.store.expressions import (
    MAIN_REWARD_NAME,
    SCORED_OUTCOMES,
    has_tags,
    has_turns,
    is_held_out,
    is_idle,
    is_rewardable,
    latest_reward,
    newest_reward,
    training_state,
)
from tracegrad.store.models import Leases, OverSampled, Rewards, Rollouts
from tracegrad.store.read.training_samples import load_samples
from tracegrad.store.rows import chunks, load, rows_of_keys
from tracegrad.store.types import Group, IncompleteGroup

MOST_UNREWARDED = 1_000  # that are asked for at once
_UNREWARDED = ("no_reward", "named_reward", "scoring_failed")  # of `training_state`


@dataclass(frozen=True, slots=True)
class OverSample:
    """So many more attempts are made at a task than its group has rollouts. `keep`: the group is
    the first of them that finish, or is drawn from them when all have finished."""

    attempts: int = 0
    keep: Literal["first", "drawn"] = "first"


NO_OVER_SAMPLE = OverSample()
NO_LEASE = {"lease_id": None, "lease_owner": None, "leased_until": None}


@dataclass(frozen=True, slots=True)
class ReadyRollout:
    rollout_id: str
    task_id: str | None
    finished_at: float
    reward: float
    newest_reward: int  # of the rewards that `reward` was chosen from (`Rewards.seq`)


def ready_rollouts(
    connection: Connection,
    tags: Mapping[str, str],
    now: float,
    *,
    alone: bool,
    idle_before: float | None = None,
    composed: bool = False,
    held_out: Mapping[str, str] | None = None,
) -> list[ReadyRollout]:
    """The oldest first; rollouts without a task only if they may be a group `alone`; none that
    are marked as held out or carry all tags of `held_out`.

    `idle_before`: with those that are idle since then, as if they were closed `now`. `composed`: as
    `latest_reward` has it."""
    query = _ended_rollouts(now, idle_before=idle_before, composed=composed)
    query = query.where(has_tags(tags), ~is_held_out(held_out))
    if not alone:
        query = query.where(Rollouts.task_id.is_not(None))
    return load(connection, ReadyRollout, query)


def ready_held_out(
    connection: Connection,
    tags: Mapping[str, str],
    held_out: Mapping[str, str] | None,
    now: float,
    *,
    composed: bool = False,
) -> list[ReadyRollout]:
    """Those that would be ready were they not held out: marked ones, whatever their tags, and of
    those with `tags` the ones that carry all tags of `held_out`."""
    which = is_held_out()
    if held_out and all(tags.get(key, value) == value for key, value in held_out.items()):
        which = or_(which, has_tags({**held_out, **tags}))
    return load(connection, ReadyRollout, _ended_rollouts(now, composed=composed).where(which))


def _ended_rollouts(
    now: float, *, idle_before: float | None = None, composed: bool = False
) -> Select[*tuple[Any, ...]]:
    """The oldest first: those with turns and a reward that nobody has. As `ready_rollouts`."""
    reward = latest_reward(composed=composed)
    ended = and_(Rollouts.finished_at.is_not(None), Rollouts.outcome.in_(SCORED_OUTCOMES))
    ended_at: ColumnElement[float | None] = Rollouts.finished_at.expression
    if idle_before is not None:
        ended = or_(ended, is_idle(idle_before))
        ended_at = func.coalesce(Rollouts.finished_at, now)
    return (
        select(
            Rollouts.rollout_id,
            Rollouts.task_id,
            ended_at.label("finished_at"),
            # In one statement: PostgreSQL shows the next one what was committed meanwhile.
            reward.label("reward"),
            newest_reward().label("newest_reward"),
        )
        .where(
            Rollouts.consumed_at.is_(None),
            ended,
            or_(Rollouts.leased_until.is_(None), Rollouts.leased_until <= now),
            reward.is_not(None),
            has_turns(),
            ~exists().where(OverSampled.rollout_id == Rollouts.rollout_id),
        )
        .order_by(ended_at, Rollouts.rollout_id)
    )


def reopened_rollouts(connection: Connection, groups: Sequence[Sequence[ReadyRollout]]) -> set[str]:
    """Those of them that have no end any more: a call came after all, in a transaction that
    committed since they were found. The others are held."""
    names = sorted(rollout.rollout_id for group in groups for rollout in group)
    finished: set[str] = set()
    for ids in chunks(names):
        ended = (Rollouts.rollout_id.in_(ids), Rollouts.finished_at.is_not(None))
        query = select(Rollouts.rollout_id).where(*ended).order_by(Rollouts.rollout_id)
        finished.update(connection.scalars(query.with_for_update(key_share=True)))
    return set(names) - finished


def unrewarded_rollouts(
    connection: Connection,
    outcome: Outcome,
    tags: Mapping[str, str],
    before: float,
    held_out: Mapping[str, str] | None = None,
) -> list[str]:
    """As `is_rewardable` has it: ended so before `before`, with turns, and nobody said what they
    were worth, nor took it back; the oldest of them."""
    told = exists().where(
        Rewards.rollout_id == Rollouts.rollout_id,
        Rewards.name == MAIN_REWARD_NAME,
        Rewards.turn.is_(None),
    )
    query = (
        select(Rollouts.rollout_id)
        .where(
            Rollouts.consumed_at.is_(None),
            Rollouts.finished_at < before,
            Rollouts.outcome == outcome,
            ~told.correlate(Rollouts),
            has_turns(),
            is_rewardable(tags, held_out),
        )
        .order_by(Rollouts.finished_at, Rollouts.rollout_id)
        .limit(MOST_UNREWARDED)
    )
    return list(connection.scalars(query))


def load_groups(
    connection: Connection,
    chosen: Sequence[Sequence[ReadyRollout]],
    lease_id: str,
    expires_at: float,
    *,
    expert_routing: bool,
) -> list[Group]:
    rollouts = [rollout for group in chosen for rollout in group]
    samples = load_samples(
        connection,
        {rollout.rollout_id: rollout.reward for rollout in rollouts},
        newest={rollout.rollout_id: rollout.newest_reward for rollout in rollouts},
        expert_routing=expert_routing,
    )
    return [
        Group(
            group_id=group[0].task_id or group[0].rollout_id,
            lease_id=lease_id,
            expires_at=expires_at,
            rollouts=[samples[rollout.rollout_id] for rollout in group],
        )
        for group in chosen
    ]


def incomplete_groups(
    connection: Connection,
    alone: Sequence[ReadyRollout],
    tags: Mapping[str, str],
    now: float,
    *,
    composed: bool = False,
) -> list[IncompleteGroup]:
    """Tasks of ready rollouts that are too few for a group, the longest waiting first."""
    by_task: dict[str, list[ReadyRollout]] = {}
    for rollout in alone:
        by_task.setdefault(rollout.task_id or rollout.rollout_id, []).append(rollout)
    coming: dict[str, dict[str, int]] = {task_id: {} for task_id in by_task}
    state = training_state(tags, now, composed=composed).label("state")
    query = (
        select(Rollouts.task_id, state, func.count())
        .where(Rollouts.consumed_at.is_(None))
        .group_by(Rollouts.task_id, state)
    )
    for task_id, name, count in rows_of_keys(connection, query, Rollouts.task_id, by_task):
        coming[str(task_id)][name] = count
    return [
        IncompleteGroup(
            task_id=task_id,
            ready=[rollout.rollout_id for rollout in rollouts],
            since=min(rollout.finished_at for rollout in rollouts),
            open=coming[task_id].get("open", 0),
            no_reward=sum(coming[task_id].get(name, 0) for name in _UNREWARDED),
            no_turns=coming[task_id].get("no_turns", 0),
        )
        for task_id, rollouts in by_task.items()
    ]


def grant(
    connection: Connection,
    groups: Sequence[Sequence[ReadyRollout]],
    lease_id: str,
    owner: str,
    now: float,
    until: float,
) -> None:
    newest = {each.rollout_id: each.newest_reward for group in groups for each in group}
    if not newest:
        return
    values = {"lease_id": lease_id, "lease_owner": owner, "leased_until": until}
    update_rollouts(connection, [*newest], values)
    given = {"lease_id": lease_id, "owner": owner, "leased_at": now, "leased_until": until}
    rows = [{**given, "rollout_id": name, "newest_reward": seq} for name, seq in newest.items()]
    connection.execute(insert(Leases), rows)


def extend(connection: Connection, leases: Mapping[str, str], until: float) -> None:
    """Rollout -> lease, all of which hold."""
    update_rollouts(connection, list(leases), {"leased_until": until})
    by_lease: dict[str, list[str]] = {}
    for rollout_id, lease_id in leases.items():
        by_lease.setdefault(lease_id, []).append(rollout_id)
    for lease_id, ids in by_lease.items():
        for some in chunks(ids):
            connection.execute(
                update(Leases)
                .where(Leases.lease_id == lease_id, Leases.rollout_id.in_(some))
                .where(Leases.released_at.is_(None))
                .values(leased_until=until)
            )


def release(connection: Connection, group: Group, now: float) -> None:
    """What the lease still holds of the group."""
    for ids in chunks([rollout.rollout_id for rollout in group.rollouts]):
        held = (Rollouts.rollout_id.in_(ids), Rollouts.lease_id == group.lease_id)
        # SQLite, asked for those that are not consumed, would look through all that are not.
        query = select(Rollouts.rollout_id, Rollouts.consumed_at).where(*held)
        rows = connection.execute(query)
        still = [rollout_id for rollout_id, consumed_at in rows if consumed_at is None]
        update_rollouts(connection, still, NO_LEASE)
        mine = (Leases.rollout_id.in_(still), Leases.lease_id == group.lease_id)
        end_leases(connection, now, *mine)


def release_owner(connection: Connection, owner: str, now: float) -> int:
    """What `owner` has. Returns how many rollouts."""
    held = (Rollouts.consumed_at.is_(None), Rollouts.lease_owner == owner)
    rows = connection.execute(select(Rollouts.rollout_id, Rollouts.lease_id).where(*held)).all()
    update_rollouts(connection, [rollout_id for rollout_id, _ in rows], NO_LEASE)
    leases = sorted({lease_id for _, lease_id in rows if lease_id is not None})
    for some in chunks(leases):
        end_leases(connection, now, Leases.lease_id.in_(some))
    return len(rows)


def end_leases(connection: Connection, now: float, *which: ColumnElement[bool]) -> None:
    connection.execute(
        update(Leases).where(Leases.released_at.is_(None), *which).values(released_at=now)
    )


def form_groups(
    ready: Sequence[ReadyRollout],
    size: int,
    stale_before: float,
    over_sample: OverSample = NO_OVER_SAMPLE,
) -> list[list[ReadyRollout]]:
    """Groups in the order in which their last rollout finished."""
    by_task: dict[tuple[str, str], list[ReadyRollout]] = {}
    for rollout in ready:
        key = ("task", rollout.task_id) if rollout.task_id else ("rollout", rollout.rollout_id)
        by_task.setdefault(key, []).append(rollout)
    # Drawn ones are drawn from all attempts, so that none is preferred for being done early.
    enough = size + over_sample.attempts if over_sample.keep == "drawn" else size
    groups = []
    for rollouts in by_task.values():
        for group in chunks(rollouts, enough):
            stale = len(group) >= 2 and group[-1].finished_at < stale_before
            if len(group) == enough or stale:
                groups.append(_kept(group, size))
    return sorted(groups, key=lambda group: group[-1].finished_at)


def _kept(group: Sequence[ReadyRollout], size: int) -> list[ReadyRollout]:
    """`size` of them, drawn by their ids, which say nothing of their rollouts."""
    if len(group) <= size:
        return list(group)
    drawn = sorted(group, key=lambda one: sha256(one.rollout_id.encode()).digest())[:size]
    return sorted(drawn, key=lambda one: (one.finished_at, one.rollout_id))


def update_rollouts(connection: Connection, ids: Sequence[str], values: Mapping[str, Any]) -> int:
    """How many there were. They are held in order, as by those who append (`write.events`)."""
    changed = 0
    for some in chunks(sorted(set(ids))):
        query = select(Rollouts.rollout_id).where(Rollouts.rollout_id.in_(some))
        connection.execute(query.order_by(Rollouts.rollout_id).with_for_update(key_share=True))
        changed += connection.execute(
            update(Rollouts).where(Rollouts.rollout_id.in_(some)).values(**values)
        ).rowcount
    return changed

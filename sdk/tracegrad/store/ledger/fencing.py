"""Whether what a step wants to consume is still the committer's: what `commit_step` refuses.

A lease is a fence: a rollout is consumed under the lease that it has now, or not at all. How long
that lease was to last does not matter as long as nobody else has taken the rollout since.
Everything here happens inside the caller's exclusive transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from sqlalchemy import Connection, select

from tracegrad.store.errors import AlreadyTrained, LeaseLost, LedgerError
from tracegrad.store.models import Rollouts, Steps, TurnLedger
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.types import LostLease, StepRecord


def refuse_duplicates(what: str, names: Iterable[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise LedgerError(f"{what} {twice[0]} is named twice ({len(twice)} are); name each once")


def refuse_step(connection: Connection, step: StepRecord) -> None:
    """A number that is taken, or weights that no committed step has."""
    there = select(Steps.run_id, Steps.checkpoint).where(Steps.step == step.step)
    for run_id, checkpoint in connection.execute(there):
        by = f"run {run_id}" if run_id else "a run that did not say its id"
        raise LedgerError(
            f"step {step.step} is in the ledger already: {by} committed it"
            f" (checkpoint {checkpoint})"
        )
    if step.parent_digest is None:
        return
    parent = select(Steps.step).where(Steps.manifest_digest == step.parent_digest).limit(1)
    if connection.scalar(parent) is None:
        raise LedgerError(
            f"step {step.step} began with weights that no committed step has (their checkpoint's"
            f" digest is {step.parent_digest}): go on from the last committed step"
        )


def refuse_recorded_turns(connection: Connection, turn_ids: Sequence[str]) -> None:
    query = select(TurnLedger.turn_id, TurnLedger.step, TurnLedger.skip_reason)
    for turn_id, step, reason in rows_of_keys(connection, query, TurnLedger.turn_id, turn_ids):
        was = f"trained by step {step}" if step is not None else f"skipped ({reason})"
        raise AlreadyTrained(f"turn {turn_id} was {was} already")


def refuse_lost_leases(
    connection: Connection, rollouts: Sequence[str], leases: Mapping[str, str]
) -> None:
    """`leases`: rollout -> the lease that it was given out under; without one it must be free."""
    lost = lost_leases(connection, {name: leases.get(name) for name in rollouts})
    lost = [each for each in lost if each.state != "removed"]  # reported with those that never were
    if not lost:
        return
    first, more = lost[0], f" ({len(lost) - 1} more like it)" if len(lost) > 1 else ""
    if first.state == "consumed":
        raise AlreadyTrained(f"{first}{more}")
    raise LeaseLost(f"{first}{more}")


def lost_leases(connection: Connection, leases: Mapping[str, str | None]) -> list[LostLease]:
    """Of rollout -> lease, those that are another's now; in the order of their ids."""
    query = select(
        Rollouts.rollout_id,
        Rollouts.lease_id,
        Rollouts.lease_owner,
        Rollouts.leased_until,
        Rollouts.consumed_at,
        Rollouts.consumed_step,
    )
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, leases)
    here = {row.rollout_id: row for row in rows}
    lost: list[LostLease] = []
    for name, lease in sorted(leases.items()):
        named = partial(LostLease, rollout_id=name, lease_id=lease)
        row = here.get(name)
        if row is None:
            lost.append(named(state="removed"))
        elif row.consumed_at is not None:
            lost.append(named(state="consumed", step=row.consumed_step))
        elif row.lease_id is None and lease is not None:
            lost.append(named(state="free", owner=row.lease_owner, leased_until=row.leased_until))
        elif row.lease_id != lease:
            lost.append(named(state="leased", owner=row.lease_owner, leased_until=row.leased_until))
    return lost

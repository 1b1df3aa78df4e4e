"""What can be fixed without losing anything that anybody could use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sqlalchemy import (
    Connection,
    Table,
    delete,
    exists,
    func,
    insert,
    inspect,
    null,
    select,
    update,
)

from tracegrad.store.databases import statements
from tracegrad.store.encoding.shared_texts import is_unused
from tracegrad.store.ledger.leases import NO_LEASE
from tracegrad.store.maintenance.checks_ledger import expired, unconsumed, unknown_keys
from tracegrad.store.maintenance.checks_secrets import remove_passwords
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.maintenance.removal_log import REPAIRS, record_removal
from tracegrad.store.models import (
    Base,
    Leases,
    RolloutKeys,
    Rollouts,
    SharedTexts,
    TurnLedger,
    Turns,
)
from tracegrad.store.rows import chunks
from tracegrad.store.store import Store


def repair(store: Store) -> Iterator[Finding]:
    """Fix, and report what was. Each kind is one transaction, counted in `removals`."""
    for check, done, one in _REPAIRS:
        with store.exclusive() as connection:
            count = one(connection)
            if count:
                record_removal(connection, REPAIRS, {"check": check}, {check: count})
        if count:
            message = done.format(count=f"{count:,}")
            yield Finding(check=check, message=message, fix="", count=count, fixed=True)


def _indexes(connection: Connection) -> int:
    inspector = inspect(connection)
    made = 0
    for table in Base.metadata.sorted_tables:
        there = {index["name"] for index in inspector.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in there:
                index.create(connection)
                made += 1
    return made


def _bare_rollouts(connection: Connection) -> int:
    """Rollouts that are only spoken of get their row back; opened now, as far as anybody knows."""
    made = 0
    for table in Base.metadata.sorted_tables:
        if any(key.column.table.name == Rollouts.__tablename__ for key in table.foreign_keys):
            made += _bare_rollouts_of(connection, table)
    return made


def _bare_rollouts_of(connection: Connection, table: Table) -> int:
    known = exists().where(Rollouts.rollout_id == table.c.rollout_id)
    query = select(table.c.rollout_id).where(table.c.rollout_id.is_not(None), ~known).distinct()
    ids = list(connection.scalars(query))
    now = time.time()
    for some in chunks(ids):
        rows = [{"rollout_id": name, "opened": False, "opened_at": now} for name in some]
        connection.execute(insert(Rollouts), rows)
    return len(ids)


def _ledger(connection: Connection) -> int:
    known = exists().where(Turns.turn_id == TurnLedger.turn_id)
    return connection.execute(delete(TurnLedger).where(~known)).rowcount


def _consumed(connection: Connection) -> int:
    step = (
        select(func.max(TurnLedger.step))
        .join(Turns, Turns.turn_id == TurnLedger.turn_id)
        .where(Turns.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    ids = list(connection.scalars(select(Rollouts.rollout_id).where(unconsumed())))
    values = {"consumed_at": time.time(), "consumed_step": step, "leased_until": null()}
    for some in chunks(ids):
        connection.execute(update(Rollouts).where(Rollouts.rollout_id.in_(some)).values(values))
    return len(ids)


def _leases(connection: Connection) -> int:
    now = statements.server_time(connection)
    connection.execute(
        update(Leases)
        .where(Leases.released_at.is_(None), Leases.leased_until <= now)
        .where(
            Leases.lease_id.in_(select(Rollouts.lease_id).where(expired(now))),
        )
        .values(released_at=now)
    )
    return connection.execute(update(Rollouts).where(expired(now)).values(NO_LEASE)).rowcount


def _keys(connection: Connection) -> int:
    where = unknown_keys(time.time())
    return connection.execute(delete(RolloutKeys).where(where)).rowcount


def _texts(connection: Connection) -> int:
    return connection.execute(delete(SharedTexts).where(is_unused())).rowcount


_REPAIRS: list[tuple[str, str, Callable[[Connection], int]]] = [
    ("schema", "{count} missing indexes were made", _indexes),
    ("orphans", "{count} rollouts that were only spoken of got their row", _bare_rollouts),
    ("orphans", "{count} rows of the ledger whose turn is gone were taken out", _ledger),
    ("consumed", "{count} trained rollouts were marked as consumed", _consumed),
    ("leases", "{count} rollouts whose lease ran out were given back", _leases),
    ("keys", "{count} keys of rollouts that never came were taken out", _keys),
    (
        "secrets",
        "the passwords in the settings of {count} steps were taken out",
        remove_passwords,
    ),
    ("texts", "{count} shared texts that no turn wants were taken out", _texts),
]

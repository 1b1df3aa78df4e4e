"""The consumption ledger: which rollouts are being trained on, and what became of each turn.

Exactly once: a turn has at most one row in `turn_ledger` (its primary key), written in the
same transaction as the step that trained it. Leases keep pullers out of each other's way, and
fence commits: who outlived a lease that somebody else has by now is refused (module `fencing`).
Leases begin and end by the database's clock (`statements.server_time`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, exc, insert, literal, null, select

from tracegrad.events import Outcome, new_id
from tracegrad.store.databases import statements
from tracegrad.store.errors import LedgerError
from tracegrad.store.expressions import SCORED_OUTCOMES, has_tags
from tracegrad.store.ledger.fencing import (
    lost_leases,
    refuse_duplicates,
    refuse_lost_leases,
    refuse_recorded_turns,
    refuse_step,
)
from tracegrad.store.ledger.group_cut import OVER_SAMPLED, cut_groups, finished_cut
from tracegrad.store.ledger.idle import (
    MOST_CLOSED,
    close_idle,
    count_idle,
    idle_query,
    inferred_open,
)
from tracegrad.store.ledger.leases import (
    NO_OVER_SAMPLE,
    OverSample,
    ReadyRollout,
    end_leases,
    extend,
    form_groups,
    grant,
    incomplete_groups,
    load_groups,
    ready_held_out,
    ready_rollouts,
    release,
    release_owner,
    reopened_rollouts,
    unrewarded_rollouts,
    update_rollouts,
)
from tracegrad.store.ledger.readiness import BatchReadiness, batch_readiness
from tracegrad.store.models import Leases, Rollouts, Steps, TurnLedger, Turns
from tracegrad.store.retry import retry_on_conflict
from tracegrad.store.rows import chunks, column_values, load, rows_of_keys, select_fields
from tracegrad.store.store import Store
from tracegrad.store.types import (
    HELD_OUT,
    LATE,
    Group,
    LeasePreview,
    LeaseRecord,
    LostLease,
    StepCommit,
    StepRecord,
    TurnDisposition,
)

NO_LEASES: Mapping[str, str] = MappingProxyType({})
NO_ADVANTAGES: Mapping[str, float] = MappingProxyType({})

T = TypeVar("T")


class Ledger:
    """For the trainer's first rank. Several processes may pull from one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lease(
        self,
        *,
        groups: int,
        group_size: int,
        owner: str,
        ttl_s: float,
        tags: Mapping[str, str] | None = None,
        incomplete_after_s: float = float("inf"),
        at_least: int | None = None,
        expert_routing: bool = True,
        held: Collection[str] = (),
        over_sample: OverSample = NO_OVER_SAMPLE,
        composed: bool = False,
        held_out: Mapping[str, str] | None = None,
    ) -> list[Group]:
        """The oldest ready groups: `groups` of them, or [] while fewer are ready.

        A rollout is ready when it finished with a scored outcome, has a reward, carries all
        `tags`, and is neither consumed nor leased. A group is the `group_size` oldest ready
        rollouts of one task; one task may fill several groups. What is left of a task is a
        group too, if it has at least two rollouts and the last of them finished more than
        `incomplete_after_s` ago. With `at_least`, fewer groups than `groups` will do.

        Rollouts with `tags` that ended unscored are consumed on the way, their turns skipped
        with the outcome as the reason; so are, as `over_sampled`, the attempts that a group was cut
        by (`over_sample`), and, as `held_out`, those that are for evaluation alone: marked ones,
        and those that carry all tags of `held_out`. The lease ends after `ttl_s` seconds by itself,
        unless it is renewed. Rollouts in `held`, which the caller has already, are not given out
        again, whatever became of their lease. `expert_routing` asks for the turns' routed experts,
        which are large.
        `composed`: a rollout has a reward when one was composed of its parts, or given by a rule;
        one that somebody gave waits for the sum that it is a part of.
        """
        _check(groups=groups, group_size=group_size, ttl_s=ttl_s)
        lease_id = new_id()

        def take(connection: Connection) -> tuple[float, list[list[ReadyRollout]]]:
            now = statements.server_time(connection)  # when its turn has come
            _consume_unscored(connection, tags or {}, now)
            _consume_over_sampled(connection, now)
            _consume_held_out(connection, tags or {}, held_out, now, composed=composed)
            ready = ready_rollouts(
                connection,
                tags or {},
                now,
                alone=group_size == 1,
                composed=composed,
                held_out=held_out,
            )
            ready = [rollout for rollout in ready if rollout.rollout_id not in held]
            before = now - incomplete_after_s
            chosen = form_groups(ready, group_size, before, over_sample)[:groups]
            while gone := reopened_rollouts(connection, chosen):
                ready = [rollout for rollout in ready if rollout.rollout_id not in gone]
                chosen = form_groups(ready, group_size, before, over_sample)[:groups]
            if len(chosen) < (groups if at_least is None else at_least):
                return now, []
            grant(connection, chosen, lease_id, owner, now, now + ttl_s)
            if over_sample.attempts:
                whole = [group for group in chosen if len(group) == group_size]
                cut_groups(connection, whole, over_sample.attempts, lease_id, tags or {}, now, held)
                _consume_over_sampled(connection, now)
            return now, chosen

        now, chosen = self._exclusively(take)
        with self._store.reading() as connection:
            return load_groups(
                connection, chosen, lease_id, now + ttl_s, expert_routing=expert_routing
            )

    def ready(self, tags: Mapping[str, str] | None = None) -> int:
        """Rollouts that `lease` could take now: what a sender of tasks holds itself back by."""
        with self._store.reading() as connection:
            now = statements.server_time(connection)
            return len(ready_rollouts(connection, tags or {}, now, alone=True))

    def unrewarded(
        self,
        outcome: Outcome,
        *,
        tags: Mapping[str, str] | None = None,
        held_out: Mapping[str, str] | None = None,
        after_s: float = 0.0,
    ) -> list[str]:
        """Rollouts with `tags`, or held out, and with turns that ended so at least `after_s`
        seconds ago, and of whose worth nobody ever said anything; a thousand of the oldest."""
        with self._store.reading() as connection:
            before = statements.server_time(connection) - after_s
            return unrewarded_rollouts(connection, outcome, tags or {}, before, held_out)

    def close_idle(self, idle_s: float, *, tags: Mapping[str, str] | None = None) -> list[str]:
        """Ends rollouts that nobody opened and that had no call for `idle_s` seconds, `MOST_CLOSED`
        at most: completed, and `Rollouts.idle_s` says that it was inferred. A call that comes later
        opens them again, until they are leased. Returns which ones."""
        with self._store.reading() as connection:
            before = statements.server_time(connection) - idle_s
            found = list(connection.scalars(idle_query(tags or {}, before, MOST_CLOSED)))

        def close(connection: Connection) -> list[str]:
            now = statements.server_time(connection)
            closed: list[str] = []
            for some in chunks(found):
                closed += close_idle(connection, some, now - idle_s, idle_s, now)
            return closed

        return self._exclusively(close) if found else []

    def readiness(
        self,
        *,
        group_size: int,
        tags: Mapping[str, str] | None = None,
        incomplete_after_s: float = float("inf"),
        over_sample: OverSample = NO_OVER_SAMPLE,
        composed: bool = False,
        held_out: Mapping[str, str] | None = None,
    ) -> BatchReadiness:
        """How many groups `lease` could give now, and what the other rollouts wait for."""
        _check(groups=1, group_size=group_size, ttl_s=1.0)
        with self._store.reading() as connection:
            return batch_readiness(
                connection,
                group_size=group_size,
                tags=tags or {},
                incomplete_after_s=incomplete_after_s,
                over_sample=over_sample,
                composed=composed,
                held_out=held_out,
            )

    def preview(
        self,
        *,
        groups: int,
        group_size: int,
        tags: Mapping[str, str] | None = None,
        incomplete_after_s: float = float("inf"),
        expert_routing: bool = True,
        idle_s: float | None = None,
        over_sample: OverSample = NO_OVER_SAMPLE,
        composed: bool = False,
        held_out: Mapping[str, str] | None = None,
    ) -> LeasePreview:
        """What `lease` would give now, after `close_idle` if `idle_s` is given; fewer than `groups`
        too, and who waits. Changes nothing."""
        _check(groups=groups, group_size=group_size, ttl_s=1.0)
        with self._store.reading() as connection:
            now = statements.server_time(connection)
            idle_before = None if idle_s is None else now - idle_s
            ready = ready_rollouts(
                connection,
                tags or {},
                now,
                alone=group_size == 1,
                idle_before=idle_before,
                composed=composed,
                held_out=held_out,
            )
            formed = form_groups(ready, group_size, now - incomplete_after_s, over_sample)
            grouped = {rollout.rollout_id for group in formed for rollout in group}
            alone = [rollout for rollout in ready if rollout.rollout_id not in grouped]
            return LeasePreview(
                groups=load_groups(
                    connection,
                    formed[:groups],
                    lease_id="",
                    expires_at=now,
                    expert_routing=expert_routing,
                ),
                more=len(formed[groups:]),
                incomplete=incomplete_groups(connection, alone, tags or {}, now, composed=composed),
                idle=0 if idle_before is None else count_idle(connection, tags or {}, idle_before),
                idle_before=idle_before,
                inferred_open=inferred_open(connection, tags or {}, now, since=idle_before),
            )

    def renew(self, leases: Mapping[str, str], *, ttl_s: float) -> list[LostLease]:
        """Leases (rollout -> lease, as of `lease_by_rollout`) end `ttl_s` seconds from now.

        A lease that ran out is renewed too if nobody took its rollout since. Returns those that
        are lost: taken by somebody else, given back, consumed or removed.
        """
        _check(groups=1, group_size=1, ttl_s=ttl_s)

        def hold(connection: Connection) -> list[LostLease]:
            lost = lost_leases(connection, leases)
            gone = {each.rollout_id for each in lost}
            kept = {name: lease for name, lease in leases.items() if name not in gone}
            extend(connection, kept, statements.server_time(connection) + ttl_s)
            return lost

        return self._exclusively(hold) if leases else []

    def release(self, groups: Sequence[Group]) -> None:
        """Give back groups that were not trained; others may lease them at once."""

        def give_back(connection: Connection) -> None:
            now = statements.server_time(connection)
            for group in groups:
                release(connection, group, now)

        self._exclusively(give_back)

    def release_owner(self, owner: str) -> int:
        """Give back all that `owner`, who was killed, still has. Returns how many rollouts."""

        return self._exclusively(
            lambda connection: release_owner(connection, owner, statements.server_time(connection))
        )

    def leases(self, rollout_id: str) -> list[LeaseRecord]:
        """Who had it to train on, and how long; the oldest first."""
        query = (
            select_fields(LeaseRecord, Leases)
            .where(Leases.rollout_id == rollout_id)
            .order_by(Leases.leased_at, Leases.lease_id)
        )
        with self._store.reading() as connection:
            return load(connection, LeaseRecord, query)

    def commit_steps(self, commits: Sequence[StepCommit]) -> None:
        """The steps in order, a row for each of their turns, their rollouts consumed: all in one
        transaction. Steps whose weights are in one checkpoint are committed together.

        Raises, and then nothing is stored:
            AlreadyTrained: a turn is in the ledger already, or a rollout is consumed.
            LeaseLost: a rollout is not under its lease any more; says who has it now.
            LedgerError: a step is in the ledger already, began with weights that no committed
                step has, names something twice, or something unknown.
        """

        def commit(connection: Connection) -> None:
            for one in commits:
                refuse_step(connection, one.step)
                connection.execute(insert(Steps), column_values(one.step, Steps))
                _record(
                    connection,
                    one.step.step,
                    one.trained,
                    one.skipped,
                    one.rollouts,
                    one.leases,
                    one.advantages,
                )

        self._exclusively(commit)

    def commit_step(
        self,
        step: StepRecord,
        *,
        trained: Sequence[str],
        skipped: Mapping[str, str],
        rollouts: Sequence[str],
        leases: Mapping[str, str] = NO_LEASES,
        advantages: Mapping[str, float] = NO_ADVANTAGES,
    ) -> None:
        """`commit_steps` of one, by the fields of a `StepCommit`."""
        one = StepCommit(
            step=step,
            trained=trained,
            skipped=skipped,
            rollouts=rollouts,
            leases=leases,
            advantages=advantages,
        )
        self.commit_steps([one])

    def commit_skipped(
        self,
        skipped: Mapping[str, str],
        rollouts: Sequence[str],
        leases: Mapping[str, str] = NO_LEASES,
    ) -> None:
        """Consume rollouts that no step used; as `commit_step` without a step."""
        self._exclusively(
            lambda connection: _record(connection, None, [], skipped, rollouts, leases)
        )

    def last_step(self) -> StepRecord | None:
        steps = self.steps(limit=1)
        return steps[0] if steps else None

    def steps(self, limit: int | None = None) -> list[StepRecord]:
        """The last `limit` steps, the oldest of them first."""
        query = select_fields(StepRecord, Steps).order_by(Steps.step.desc()).limit(limit)
        with self._store.reading() as connection:
            return load(connection, StepRecord, query)[::-1]

    def _exclusively(self, work: Callable[[Connection], T]) -> T:
        def once() -> T:
            with self._store.exclusive() as connection:
                return work(connection)

        return retry_on_conflict(once)


def _check(*, groups: int, group_size: int, ttl_s: float) -> None:
    for name, value in (("groups", groups), ("group_size", group_size)):
        if value < 1:
            raise ValueError(f"{name}: {value}; ask for at least 1")
    if not ttl_s > 0:
        raise ValueError(f"ttl_s: {ttl_s}; give seconds above 0")


def _consume_unscored(connection: Connection, tags: Mapping[str, str], now: float) -> None:
    unscored = (
        Rollouts.consumed_at.is_(None),
        Rollouts.finished_at.is_not(None),
        Rollouts.outcome.not_in(SCORED_OUTCOMES),
        has_tags(tags),
    )
    ids = list(connection.scalars(select(Rollouts.rollout_id).where(*unscored)))
    _consume(connection, ids, Rollouts.outcome.expression, now)


def _consume_held_out(
    connection: Connection,
    tags: Mapping[str, str],
    held_out: Mapping[str, str] | None,
    now: float,
    *,
    composed: bool,
) -> None:
    """Those that would be leased."""
    ready = ready_held_out(connection, tags, held_out, now, composed=composed)
    reopened = reopened_rollouts(connection, [ready])
    ids = [each.rollout_id for each in ready if each.rollout_id not in reopened]
    _consume(connection, ids, literal(HELD_OUT), now)


def _consume(
    connection: Connection, ids: Sequence[str], reason: ColumnElement[Any], now: float
) -> None:
    for some in chunks(ids):
        turns = (
            select(Turns.turn_id, null(), reason, literal(now))
            .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
            .where(Rollouts.rollout_id.in_(some))
        )
        columns = ["turn_id", "step", "skip_reason", "created_at"]
        connection.execute(insert(TurnLedger).from_select(columns, turns))
    update_rollouts(connection, list(ids), {"consumed_at": now})


def _consume_over_sampled(connection: Connection, now: float) -> None:
    """Those that have ended; the others are when they have."""
    _consume(connection, finished_cut(connection), literal(OVER_SAMPLED), now)


def _record(
    connection: Connection,
    step: int | None,
    trained: Sequence[str],
    skipped: Mapping[str, str],
    rollouts: Sequence[str],
    leases: Mapping[str, str],
    advantages: Mapping[str, float] = NO_ADVANTAGES,
) -> None:
    refuse_duplicates("turn", trained)
    refuse_duplicates("rollout", rollouts)
    if both := set(trained) & skipped.keys():
        raise LedgerError(f"turn {min(both)} is both trained and skipped")
    refuse_recorded_turns(connection, [*trained, *skipped])
    refuse_lost_leases(connection, rollouts, leases)
    now = statements.server_time(connection)
    dispositions = {
        name: TurnDisposition(step, None, now, advantages.get(name)) for name in trained
    }
    dispositions |= {name: TurnDisposition(None, why, now) for name, why in skipped.items()}
    _insert_dispositions(connection, dispositions)
    query = (
        select(Turns.turn_id)
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .where(TurnLedger.turn_id.is_(None))
    )
    late = [row.turn_id for row in rows_of_keys(connection, query, Turns.rollout_id, rollouts)]
    _insert_dispositions(connection, dict.fromkeys(late, TurnDisposition(None, LATE, now)))
    values = {"consumed_at": now, "consumed_step": step, "leased_until": None}
    changed = update_rollouts(connection, list(rollouts), values)
    for ids in chunks(list(rollouts)):
        end_leases(connection, now, Leases.rollout_id.in_(ids), Leases.leased_until > now)
    if changed != len(rollouts):
        raise LedgerError(f"{len(rollouts) - changed} of the step's rollouts are not stored")


def _insert_dispositions(
    connection: Connection, dispositions: Mapping[str, TurnDisposition]
) -> None:
    rows = [
        {"turn_id": turn_id, **column_values(each, TurnLedger)}
        for turn_id, each in dispositions.items()
    ]
    if not rows:
        return
    try:
        connection.execute(insert(TurnLedger), rows)
    except exc.IntegrityError as error:
        raise LedgerError(f"the ledger names a turn that is not stored ({error.orig})") from error

"""Intake: trainers say how many rollouts they want, drivers hold places for those they will open.

Both stand in the store, so that all proxies and workers of them agree. A place is the id of a
rollout that is not open yet; it counts as one that is, until it expires. A trainer renews what it
asks for (`HEARTBEAT_S`); one that does not for `DEAD_AFTER_S` holds nobody back any more. Where
several trainers have one store, whichever has more room decides.

Nobody is refused a call, or a rollout that was opened without asking: it is counted all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, delete, exists, func, or_, select, true, update

from tracegrad.events import new_id
from tracegrad.store.databases import statements
from tracegrad.store.expressions import (
    SCORED_OUTCOMES,
    has_turns,
    is_selected,
    latest_reward,
    newest_turn,
)
from tracegrad.store.ledger.intake_capacity import (
    MIN_RETRY_S,
    Capacity,
    IntakeCounts,
    IntakeLimits,
    fits,
    intake_capacity,
    retry_after_s,
)
from tracegrad.store.ledger.leases import ready_rollouts
from tracegrad.store.models import IntakeRequests, OverSampled, RolloutPlaces, Rollouts
from tracegrad.store.retry import retry_on_conflict
from tracegrad.store.store import Store

HEARTBEAT_S = 10.0
DEAD_AFTER_S = 60.0
# A place that nobody opened a rollout in by then is free again.
PLACE_TTL_S = 60.0
# Places are kept for the time that drivers waited, which a step's metrics have.
_PLACES_KEPT_S = 86_400.0
# Longer ago than any look at the intake takes.
_PLACES_SEEN_S = 3_600.0
MOST_ROLLOUTS = 10_000  # that one ask may be for

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRequest:
    """What a trainer asks of drivers.

    made: leases of steps whose weights are served, and which are not committed yet.
    step_s: how long the last steps took, each.
    silent_s: an open rollout without a call for so long, and one that waits for its reward so
        long, take no place any more; nor do attempts of a group that is never made up.
    useless: as of `IntakeCounts`.
    """

    owner: str
    version: int
    limits: IntakeLimits
    tags: Mapping[str, str]
    silent_s: float
    made: Sequence[str] = ()
    step_s: float | None = None
    useless: int = 0

    def stored(self) -> dict[str, Any]:
        found = asdict(self)
        del found["owner"], found["version"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeState:
    """What there is room for now. `reason` is "" where there is any.

    paced: a living trainer bounds what is opened. attempts: rollouts of one group; None: no trainer
    says. silent_for_s: since the trainer's last sign, where one asked once; it is dead after
    `DEAD_AFTER_S`.
    """

    paced: bool
    capacity: Capacity
    reason: str = ""
    retry_after_s: float = 0.0
    version: int | None = None
    attempts: int | None = None
    limits: IntakeLimits | None = None
    counts: IntakeCounts | None = None
    silent_for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """`rollout_ids` may be opened; none: `state` says why not, and when to ask again."""

    rollout_ids: list[str]
    state: IntakeState


@dataclass(frozen=True, slots=True)
class GrantedPlaces:
    """Places that were given out, and how long those who asked had waited, in seconds."""

    places: int
    waited_s: float


class Intake:
    """Of one store. All methods raise StoreError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # The trainer's side

    def request(self, wanted: IntakeRequest, *, stepped: bool = False) -> None:
        """What is wanted from now on. `stepped`: a step's weights are served since just now."""

        def put(connection: Connection) -> None:
            now = statements.server_time(connection)
            known = select(IntakeRequests.stepped_at).where(IntakeRequests.owner == wanted.owner)
            row = {
                "owner": wanted.owner,
                "version": wanted.version,
                "wanted": wanted.stored(),
                "stepped_at": now if stepped else connection.scalar(known),
                "updated_at": now,
            }
            connection.execute(statements.upsert(connection, IntakeRequests, "owner"), row)

        self._exclusively(put)

    def renew(self, owner: str) -> None:
        """A sign of life."""

        def touch(connection: Connection) -> None:
            now = statements.server_time(connection)
            mine = update(IntakeRequests).where(IntakeRequests.owner == owner)
            connection.execute(mine.values(updated_at=now))

        self._exclusively(touch)

    def withdraw(self, owner: str) -> None:
        """The trainer ends: it holds nobody back any more."""
        mine = delete(IntakeRequests).where(IntakeRequests.owner == owner)
        self._exclusively(lambda connection: connection.execute(mine).rowcount)

    def granted(self, *, after: float, until: float) -> GrantedPlaces:
        """Places that were given out between both times, of the store's clock."""
        query = select(func.count(), func.sum(RolloutPlaces.waited_s)).where(
            RolloutPlaces.granted_at > after, RolloutPlaces.granted_at <= until
        )
        with self._store.reading() as connection:
            places, waited_s = connection.execute(query).one()
            return GrantedPlaces(places, float(waited_s or 0.0))

    def now(self) -> float:
        """The store's clock."""
        with self._store.reading() as connection:
            return statements.server_time(connection)

    # The drivers' side

    def state(self, *, wanted: int | None = None) -> IntakeState:
        """For `wanted` rollouts; None: for one group."""
        with self._store.reading() as connection:
            return _state(connection, statements.server_time(connection), wanted)

    def ask(self, wanted: int | None = None, *, waited_s: float = 0.0) -> Places:
        """Places for `wanted` rollouts (None: one group's attempts), all or none. `waited_s`: how
        long the asker has waited for them.

        Raises ValueError: more are asked for than there can ever be room for.
        """
        seen, found = self._look(wanted)
        number = wanted or found.attempts or 1
        _refuse_too_many(number, found.limits)
        if not fits(found.capacity, number):
            return Places([], found)
        ids = [new_id() for _ in range(number)]
        if found.paced:
            found = self._take(ids, found, seen, waited_s)
        return Places([] if found.reason else ids, found)

    def is_opened(self, rollout_id: str) -> bool:
        """Whether somebody said of which task and tags it is."""
        query = select(Rollouts.rollout_id).where(
            Rollouts.rollout_id == rollout_id, Rollouts.opened.is_(True)
        )
        with self._store.reading() as connection:
            return connection.scalar(query) is not None

    def needs_place(self, rollout_id: str) -> bool:
        """Whether some trainer selects it, and it has neither begun nor a place."""
        with self._store.reading() as connection:
            living = _requests(connection, statements.server_time(connection))
            return any(_needs_place(connection, rollout_id, one.tags) for one, _ in living)

    def begin(self, rollout_id: str, *, waited_s: float = 0.0) -> IntakeState:
        """A place for a rollout that was opened without one and is to have its first call; it has
        one where `reason` is "". Those that training does not select, and those that have begun or
        have one, need none."""

        seen, found = self._look(1, begins=rollout_id)
        if found.reason or not found.paced:
            return found
        return self._take([rollout_id], found, seen, waited_s)

    def _look(
        self, wanted: int | None, *, begins: str | None = None
    ) -> tuple[_SeenPlaces, IntakeState]:
        with self._store.reading() as connection:
            now = statements.server_time(connection)
            # First: what is granted after this is counted again where it is taken.
            since = now - _PLACES_SEEN_S
            seen = _SeenPlaces(since, _granted_since(connection, since))
            return seen, _state(connection, now, wanted, begins=begins)

    def _take(
        self, ids: Sequence[str], state: IntakeState, seen: _SeenPlaces, waited_s: float
    ) -> IntakeState:
        """The state; with a reason where others have taken the room since it was looked at. The
        store's only writer for a moment: nothing but places is counted here."""

        def take(connection: Connection) -> IntakeState:
            others = _granted_since(connection, seen.since) - seen.places
            left = (state.capacity.rollouts or 0) - others
            if len(ids) > left:
                return _taken_by_others(state, others, max(0, left))
            _give(connection, ids, statements.server_time(connection), waited_s)
            return state

        return self._exclusively(take)

    def _exclusively(self, work: Callable[[Connection], T]) -> T:
        def once() -> T:
            with self._store.exclusive() as connection:
                return work(connection)

        return retry_on_conflict(once)


@dataclass(frozen=True, slots=True)
class _SeenPlaces:
    """How many had been given out `since` then, when the intake was looked at."""

    since: float
    places: int


def _granted_since(connection: Connection, since: float) -> int:
    query = select(func.count()).where(RolloutPlaces.granted_at > since)
    return int(connection.scalar(query) or 0)


def _taken_by_others(state: IntakeState, others: int, left: int) -> IntakeState:
    assert state.limits is not None, "who is paced has limits"
    assert state.counts is not None, "and counts"
    counts = replace(state.counts, open=state.counts.open + others)
    capacity = replace(state.capacity, rollouts=left, steps=1)
    reason = describe_limit(capacity, state.limits, counts)
    return replace(
        state, capacity=capacity, counts=counts, reason=reason, retry_after_s=MIN_RETRY_S
    )


def _refuse_too_many(number: int, limits: IntakeLimits | None) -> None:
    most = MOST_ROLLOUTS
    if limits is not None and limits.in_flight is not None:
        most = min(most, limits.in_flight)
    if number > most:
        raise ValueError(
            f"rollouts: {number} are asked for at once, and at most {most} are ever open together"
            " (data.in_flight): ask for fewer"
        )


def _give(connection: Connection, ids: Sequence[str], now: float, waited_s: float) -> None:
    old = RolloutPlaces.granted_at < now - _PLACES_KEPT_S
    connection.execute(delete(RolloutPlaces).where(old))
    given = {"granted_at": now, "expires_at": now + PLACE_TTL_S, "waited_s": waited_s / len(ids)}
    rows = [{"rollout_id": rollout_id, **given} for rollout_id in ids]
    connection.execute(statements.insert_new(connection, RolloutPlaces), rows)


def _requests(connection: Connection, now: float) -> list[tuple[IntakeRequest, float | None]]:
    """Of living trainers, with when each made its last step."""
    living = select(IntakeRequests).where(IntakeRequests.updated_at > now - DEAD_AFTER_S)
    found = []
    for row in connection.execute(living.order_by(IntakeRequests.owner)):
        fields = dict(row.wanted)
        limits = IntakeLimits(**fields.pop("limits"))
        request = IntakeRequest(owner=row.owner, version=row.version, limits=limits, **fields)
        found.append((request, row.stepped_at))
    return found


def _state(
    connection: Connection, now: float, wanted: int | None, *, begins: str | None = None
) -> IntakeState:
    last = connection.scalar(select(func.max(IntakeRequests.updated_at)))
    silent_for_s = None if last is None else max(0.0, now - last)
    free = IntakeState(paced=False, capacity=Capacity(None), silent_for_s=silent_for_s)
    found = []
    for request, stepped_at in _requests(connection, now):
        if begins is not None and not _needs_place(connection, begins, request.tags):
            continue
        number = request.limits.attempts if wanted is None else wanted
        counts = count_intake(connection, request, now)
        capacity = intake_capacity(
            request.limits, counts, wanted=number, of_begun=begins is not None
        )
        if capacity.rollouts is None:
            return replace(free, attempts=request.limits.attempts, version=request.version)
        reason = "" if fits(capacity, number) else describe_limit(capacity, request.limits, counts)
        since_s = None if stepped_at is None else now - stepped_at
        found.append(
            IntakeState(
                paced=True,
                capacity=capacity,
                reason=reason,
                retry_after_s=retry_after_s(capacity, step_s=request.step_s, since_step_s=since_s)
                if reason
                else 0.0,
                version=request.version,
                attempts=request.limits.attempts,
                limits=request.limits,
                counts=counts,
                silent_for_s=silent_for_s,
            )
        )
    return max(found, key=lambda state: state.capacity.rollouts or 0, default=free)


def describe_limit(capacity: Capacity, limits: IntakeLimits, counts: IntakeCounts) -> str:
    """Why there is no room, in a line."""
    there = f"{counts.open} open, {counts.waiting} waiting to be trained"
    if capacity.limit == "in_flight":
        return f"data.in_flight = {limits.in_flight}: {there}"
    step = f", {counts.leased} in the step under way" if counts.leased else ""
    if capacity.limit == "synchronous":
        return f"data.synchronous: {there}{step}; the next batch is opened after the push"
    ahead = f"{(limits.max_staleness or 0) + 1} batches of {limits.batch}"
    return f"batches.max_staleness = {limits.max_staleness}: {there}{step}, of {ahead}"


def _needs_place(connection: Connection, rollout_id: str, tags: Mapping[str, str]) -> bool:
    placed = exists().where(RolloutPlaces.rollout_id == rollout_id)
    query = select(Rollouts.rollout_id).where(
        Rollouts.rollout_id == rollout_id, is_selected(tags), ~has_turns(), ~placed
    )
    return connection.scalar(query) is not None


def count_intake(connection: Connection, request: IntakeRequest, now: float) -> IntakeCounts:
    """What there is of a trainer's rollouts.

    In the order in which a rollout goes its way: where statements see what was committed between
    them (PostgreSQL), it is counted twice, and never left out.
    """
    promised = _promised(connection, request.tags, now)
    limits, since = request.limits, now - request.silent_s
    of_task: Counter[str | None] = Counter()
    opened = _open(connection, request.tags, since)
    for task_id, cut, _ in opened:
        of_task[task_id] += not cut
    unscored = _unscored(connection, request.tags, since)
    of_task.update(unscored)
    ready = ready_rollouts(connection, request.tags, now, alone=limits.group_size == 1)
    whole = Counter(rollout.task_id for rollout in ready)
    # Of a group that nobody makes up some would stand in the way for ever.
    ready = [
        one for one in ready if one.finished_at > since or whole[one.task_id] >= limits.group_size
    ]
    of_task.update(one.task_id for one in ready)
    waiting = len(ready) + unscored.total()
    groups = promised // limits.attempts
    alone = limits.group_size == 1
    groups += sum(n // limits.group_size for task, n in of_task.items() if task or alone)
    return IntakeCounts(
        open=len(opened) + promised,
        cut=sum(cut for _, cut, _ in opened),
        begun=sum(begun for _, _, begun in opened) + promised,
        waiting=waiting,
        leased=_leased(connection, request, now),
        useless=request.useless,
        groups=groups,
    )


def _open(
    connection: Connection, tags: Mapping[str, str], since: float
) -> list[tuple[str | None, bool, bool]]:
    """Of each its task, whether it was cut, and whether it had a call or a place."""
    cut = exists().where(OverSampled.rollout_id == Rollouts.rollout_id).correlate(Rollouts)
    placed = (
        exists()
        .where(RolloutPlaces.rollout_id == Rollouts.rollout_id)
        .where(RolloutPlaces.granted_at > since)
        .correlate(Rollouts)
    )
    columns = (
        Rollouts.task_id,
        Rollouts.opened_at,
        newest_turn().label("called"),
        cut.label("cut"),
        placed.label("placed"),
    )
    query = select(*columns).where(
        Rollouts.consumed_at.is_(None), Rollouts.finished_at.is_(None), is_selected(tags)
    )
    return [
        (row.task_id, bool(row.cut), row.called is not None or bool(row.placed))
        for row in connection.execute(query)
        if max(row.opened_at, row.called or 0.0) > since
    ]


def _unscored(connection: Connection, tags: Mapping[str, str], since: float) -> Counter[str | None]:
    """Ended since then, with turns, and without a reward so far: by task."""
    ended = (
        Rollouts.consumed_at.is_(None),
        Rollouts.finished_at > since,
        Rollouts.outcome.in_(SCORED_OUTCOMES),
        latest_reward().is_(None),
        has_turns(),
        is_selected(tags),
    )
    query = select(Rollouts.task_id, func.count()).where(*ended).group_by(Rollouts.task_id)
    return Counter(dict(connection.execute(query).tuples().all()))


def _promised(connection: Connection, tags: Mapping[str, str], now: float) -> int:
    """Places whose rollouts are not open yet. A rollout's first call may be stored before its
    opening, which says of which tags it is: until then the place counts for it."""
    known = or_(Rollouts.opened.is_(True), is_selected(tags)) if tags else true()
    opened = exists().where(Rollouts.rollout_id == RolloutPlaces.rollout_id, known)
    query = select(func.count()).where(
        RolloutPlaces.expires_at > now, ~opened.correlate(RolloutPlaces)
    )
    return int(connection.scalar(query) or 0)


def _leased(connection: Connection, request: IntakeRequest, now: float) -> int:
    """By this trainer, for steps that are not made yet."""
    made = Rollouts.lease_id.not_in(list(request.made)) if request.made else true()
    held = and_(Rollouts.lease_owner == request.owner, Rollouts.leased_until > now)
    query = select(func.count()).where(Rollouts.consumed_at.is_(None), held, made)
    return int(connection.scalar(query) or 0)

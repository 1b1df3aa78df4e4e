"""The store: one database that the proxy writes, the trainer and people read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar

from sqlalchemy import Connection, Engine, insert, select
from sqlalchemy.exc import IntegrityError

from tracegrad.events import Event, Reward, RolloutFinished, Span, Turn
from tracegrad.store.databases import (
    BUSY_TIMEOUT_S,
    Conflict,
    Database,
    database_at,
    statements,
    upsert,
)
from tracegrad.store.errors import StoreMissing
from tracegrad.store.migrate import migrate, revision_of
from tracegrad.store.models import REVISION, PolicyVersions, Rewards, VersionEvents
from tracegrad.store.read import (
    call_counts,
    inferred,
    reward_arrival,
    scorings,
    turn_scopes,
    turns,
)
from tracegrad.store.read import rollouts as queries
from tracegrad.store.read import versions as version_records
from tracegrad.store.read.reward_arrival import LateRewards, RewardTarget
from tracegrad.store.retry import retry_on_conflict
from tracegrad.store.rows import column_values, load, select_fields
from tracegrad.store.types import PolicyVersion, Scoring
from tracegrad.store.write import api_keys
from tracegrad.store.write import decisions as deciding
from tracegrad.store.write import events as writing
from tracegrad.store.write.events import EventBatch, rows_from_store, sort_events, write_batch
from tracegrad.store.write.parent_cache import ParentCache, last_removal
from tracegrad.store.write.scorings import ScoredMeanwhile, add_scorings
from tracegrad.store.write.turn_rows import TurnRows, make_turn_rows

DEFAULT_URL = "sqlite:///.tracegrad/store.db"

# What is done in a transaction, as the last thing before its commit.
BeforeCommit = Callable[[Connection, Sequence[str]], None]


P = ParamSpec("P")
T = TypeVar("T")


def _method(
    work: Callable[Concatenate[Connection, P], T],
    transaction: Literal["reading", "appending"] = "reading",
) -> Callable[Concatenate[Store, P], T]:
    """A method of the store that does the work in a transaction of this kind."""

    def method(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with getattr(self, transaction)() as connection:
            return work(connection, *args, **kwargs)

    method.__name__, method.__doc__ = work.__name__, work.__doc__
    method.__qualname__ = f"Store.{work.__name__}"
    return method


class SecretValue(Protocol):
    """`tracegrad.proxy.config.SecretUrl`, as settings hold a store's URL."""

    def get_secret_value(self) -> str: ...


class _StaleParentCache(Conflict):
    """What a turn refers to may have been changed since it was read (`parent_cache`)."""


class Store:
    """Safe to use from many threads; several processes may open the same URL.

    Every method may raise `StoreUnavailable`; then nothing of the call was stored, unless the
    connection to a server broke in the very commit: events may simply be written again.
    """

    def __init__(self, database: Database, engine: Engine) -> None:
        self.database = database
        self._engine = engine
        self._parent_cache = ParentCache()

    @classmethod
    def open(
        cls,
        url: str | SecretValue = DEFAULT_URL,
        *,
        create: bool = True,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> Store:
        """Open the store, its tables brought to the current revision.

        `create=False` raises `StoreMissing` where there is none. `busy_timeout_s` bounds the
        wait for another process's write. ValueError: the URL is no use.
        """
        database = database_at(url if isinstance(url, str) else url.get_secret_value())
        database.prepare(create=create)
        store = cls(database, database.engine(busy_timeout_s=busy_timeout_s))
        try:
            store._bring_up_to_date(create=create)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def attach(cls, url: str | SecretValue) -> Store:
        """One that this program has opened before, in another process of its own: it is neither
        made nor migrated, and may be away just now. ValueError: the URL is no use."""
        database = database_at(url if isinstance(url, str) else url.get_secret_value())
        return cls(database, database.engine(busy_timeout_s=BUSY_TIMEOUT_S))

    def _bring_up_to_date(self, *, create: bool) -> None:
        with self.reading() as connection:
            revision = revision_of(connection)
        if revision is None and not create:
            raise StoreMissing(f"no store at {self.database.describe()}")
        if revision != REVISION:
            # The lock is held over check and change: processes that open at once take turns.
            with self.exclusive() as connection:
                migrate(connection)
        with self.reading() as connection:
            self._parent_cache.invalidate_before(last_removal(connection))

    def close(self) -> None:
        self._engine.dispose()

    def remember_turns(self, most: int) -> None:
        """So many of the latest turns are in memory for those that continue them; others are read
        again."""
        self._parent_cache.keep(most)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one state of the store."""
        return self._transaction(self.database.reading)

    def appending(self) -> AbstractContextManager[Connection]:
        """A transaction that adds events (`databases.base`)."""
        return self._transaction(self.database.appending)

    def exclusive(self) -> AbstractContextManager[Connection]:
        """The only transaction of its kind until it commits (`databases.base`)."""
        return self._transaction(self.database.exclusive)

    @contextmanager
    def _transaction(
        self, begin: Callable[[Engine], AbstractContextManager[Connection]]
    ) -> Iterator[Connection]:
        with self.database.one_line_errors(), begin(self._engine) as connection:
            yield connection

    # Events

    def append(self, events: Sequence[Event], *, before_commit: BeforeCommit | None = None) -> None:
        """All of them in one transaction, on the disk on return; known ids change nothing.

        `before_commit` is called in the transaction when all is written, with the ids of the turns
        that are new: once, or again where the transaction was rolled back and is repeated.
        Raises `EventRejected`, and then stores none of them.
        """
        if not events:
            return
        batch = sort_events(events)
        last = before_commit or _nothing
        try:
            self._append_from_cache(batch, last)
        except (Conflict, IntegrityError):
            self._parent_cache.forget(batch.first_seen)
            as_of = retry_on_conflict(
                lambda: self._append_from_store(batch, last), on=(Conflict, IntegrityError)
            )
            self._parent_cache.invalidate_before(as_of)

    def _append_from_cache(self, batch: EventBatch, before_commit: BeforeCommit) -> None:
        known = self._parent_cache.lookup(batch.turns.values(), self.reading)
        rows, contexts = make_turn_rows(batch.turns.values(), known)
        with self.appending() as connection:
            write_batch(
                connection, batch, rows, self._parent_cache.rollouts_not_cached(batch.first_seen)
            )
            _check_cache_is_current(connection, rows, known.as_of)
            before_commit(connection, rows.turn_ids())
        self._parent_cache.remember(contexts, rows.texts, known.as_of)

    def _append_from_store(self, batch: EventBatch, before_commit: BeforeCommit) -> int:
        """For a batch with turns that are stored already, that rely on some that are gone, or that
        others write at the same time. Returns the last removal that it knew of."""
        with self.appending() as connection:
            rows, _ = rows_from_store(connection, batch)
            # Since their rollouts were held nobody removes anything of them.
            as_of = last_removal(connection)
            write_batch(connection, batch, rows, new_rollouts=())
            before_commit(connection, rows.turn_ids())
        return as_of

    mark_unacknowledged = _method(writing.mark_unacknowledged, "appending")

    def rollout_turns(
        self, rollout_id: str, *, raw: bool = True, expert_routing: bool = True
    ) -> list[Turn]:
        """In order of capture; `raw=False` leaves requests and responses out,
        `expert_routing=False` routed experts.

        Requests of one conversation hold the same items in memory: do not change them. Raises
        `StoreCorrupt` where tokens or requests are not the ones that were stored.
        """
        with self.reading() as connection:
            return turns.load_turns(
                connection, [rollout_id], raw=raw, expert_routing=expert_routing
            )[rollout_id]

    find_turn = _method(turns.find_turn)
    count_turns = _method(turns.count_turns)
    recent_inferred = _method(inferred.recent_inferred)

    def rewards(self, rollout_id: str) -> list[Reward]:
        with self.reading() as connection:
            return queries.load_rewards(connection, [rollout_id])[rollout_id]

    def reward_targets(self, rollout_ids: Collection[str]) -> list[RewardTarget]:
        """What is known of rollouts that were given a reward, of those that are stored."""
        with self.reading() as connection:
            now = statements.server_time(connection)
            return reward_arrival.reward_targets(connection, rollout_ids, now)

    count_calls = _method(call_counts.count_calls)

    def late_reward_ids(self, reward_ids: Collection[str]) -> frozenset[str]:
        """Those of them that arrived when training had taken their rollouts'."""
        with self.reading() as connection:
            now = statements.server_time(connection)
            column = Rewards.reward_id
            return reward_arrival.late_reward_ids(connection, column, reward_ids, now)

    def late_rewards(self, *, after: int = 0) -> LateRewards:
        """Rewards that arrived when their rollouts had been trained or skipped."""
        with self.reading() as connection:
            now = statements.server_time(connection)
            return reward_arrival.late_rewards(connection, now, after=after)

    # Scorings

    def record_scorings(
        self,
        outcomes: Sequence[Scoring],
        rewards: Sequence[Reward],
        *,
        task_id: str | None = None,
        replaces: str = "",
    ) -> bool:
        """How scorers ended with rollouts, and what these were given, in one transaction, which
        also groups them by `task_id` (`add_scorings`). False: another worker has written one of the
        outcomes, or a rollout is gone; then nothing is stored. Raises EventRejected."""

        def once() -> None:
            with self.appending() as connection:
                add_scorings(connection, outcomes, rewards, task_id=task_id, replaces=replaces)

        try:
            retry_on_conflict(once)
        except ScoredMeanwhile:
            return False
        return True

    scoring_candidates = _method(scorings.scoring_candidates)
    newest_reward = _method(scorings.newest_reward_of_all)
    count_scorings = _method(scorings.count_scorings)

    def scorings(self, rollout_id: str) -> list[Scoring]:
        """In order; of each scorer the last one counts."""
        with self.reading() as connection:
            return scorings.load_scorings(connection, [rollout_id])[rollout_id]

    def outcomes(self, rollout_id: str) -> list[RolloutFinished]:
        """Every reported end, in order of arrival. The first one counts."""
        with self.reading() as connection:
            return queries.load_outcomes(connection, [rollout_id])[rollout_id]

    turns_by_agent = _method(turn_scopes.turns_by_agent)
    turn_scopes = _method(turn_scopes.load_turn_scopes)

    def spans(self, rollout_id: str) -> list[Span]:
        with self.reading() as connection:
            return queries.load_spans(connection, [rollout_id])[rollout_id]

    # Traces

    rollouts_of_traces = _method(queries.rollouts_of_traces)
    calling_spans = _method(turns.calling_spans)
    rollout_of_turn = _method(turns.rollout_of_turn)
    turn_order = _method(turns.turn_order)

    # Keys of rollouts

    add_key = _method(api_keys.add_key, "appending")
    key_owner = _method(api_keys.key_owner)
    revoke_keys = _method(api_keys.revoke_keys, "appending")

    # Questions

    rollouts = _method(queries.list_rollouts)
    rollout = _method(queries.rollout_detail)
    turn_counts = _method(queries.turn_counts)
    reward_curve = _method(queries.reward_curve)

    # Policy versions

    def record_version(self, version: PolicyVersion) -> None:
        """What became of a version; the latest record is its state."""
        row = column_values(version, PolicyVersions)
        with self.appending() as connection:
            connection.execute(upsert(connection, PolicyVersions, "version"), row)
            connection.execute(insert(VersionEvents), row)

    def note_version(self, event: PolicyVersion) -> None:
        """What became of a version beside its state: its weights are kept, it was evaluated."""
        with self.appending() as connection:
            connection.execute(insert(VersionEvents), column_values(event, VersionEvents))

    def versions(self) -> list[PolicyVersion]:
        """The oldest first."""
        query = select_fields(PolicyVersion, PolicyVersions).order_by(PolicyVersions.version)
        with self.reading() as connection:
            return load(connection, PolicyVersion, query)

    def failed_versions(self) -> list[int]:
        """Those whose push failed, the oldest first."""
        failed = PolicyVersions.state == "failed"
        query = select(PolicyVersions.version).where(failed).order_by(PolicyVersions.version)
        with self.reading() as connection:
            return list(connection.scalars(query))

    version_events = _method(queries.version_events)

    # Decisions about versions and training

    decide = _method(deciding.decide, "appending")
    decisions = _method(deciding.decisions)
    count_decisions = _method(deciding.count_decisions)
    open_decisions = _method(deciding.open_decisions)
    close_decision = _method(deciding.close_decision, "appending")

    def current_version(self) -> int | None:
        """The version that is served; None before the first."""
        with self.reading() as connection:
            return version_records.serving_version(connection)

    version_history = _method(version_records.version_history)
    served_model = _method(version_records.served_model)
    training_pause = _method(version_records.training_pause)
    rolled_back_versions = _method(version_records.rolled_back_versions)
    kept_steps = _method(version_records.kept_steps)


def _nothing(_connection: Connection, _new: Sequence[str]) -> None:
    pass


def _check_cache_is_current(connection: Connection, rows: TurnRows, as_of: int) -> None:
    """After the rows were written: whoever changes their rollouts now waits for them, and whoever
    did so before has committed."""
    refers = rows.links or any(
        row["parent_id"] is not None or row["request_base"] is not None for row in rows.turns
    )
    if refers and last_removal(connection) != as_of:
        raise _StaleParentCache("what the turns continue is being changed; try again")

"""Writers that meet in PostgreSQL: nobody is overwritten, locked out, or sees half of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, insert, select, text, update

from support.store import postgres_server as postgres
from support.store.events import make_turn, rollout_events
from tracegrad.events import Event, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import EventRejected, Ledger, Store
from tracegrad.store.models import Rewards, Rollouts
from tracegrad.store.write import parent_cache
from tracegrad.store.write.parent_cache import ParentInfo


def test_appending_transactions_run_side_by_side(postgres_url: str) -> None:
    with Store.open(postgres_url) as one, Store.open(postgres_url, busy_timeout_s=0.2) as other:
        with one.appending() as connection:
            row = {"rollout_id": "mine", "opened": False, "opened_at": 1.0}
            connection.execute(insert(Rollouts), row)
            other.append(rollout_events("theirs"))
            assert [row.rollout_id for row in other.rollouts()] == ["theirs"]
        assert {row.rollout_id for row in other.rollouts()} == {"mine", "theirs"}


def test_a_reader_sees_one_state_whatever_is_written_meanwhile(url: str) -> None:
    with Store.open(url) as reader, Store.open(url) as writer:
        writer.append([make_turn("t0")])
        with reader.reading() as connection:
            query = select(Rollouts.rollout_id)
            assert connection.scalars(query).all() == ["r"]
            writer.append([make_turn("t1", "s")])
            assert connection.scalars(query).all() == ["r"]
        assert len(reader.rollouts()) == 2


def waiting_for_a_lock(server: postgres.Server, url: str, many: int = 1) -> None:
    """Returns when so many wait."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
    deadline = time.monotonic() + 25  # before their wait times out
    with server.connect() as connection:
        while time.monotonic() < deadline:
            if connection.execute(query, [postgres.database_of(url)]).fetchone() == (many,):
                return
            time.sleep(0.005)
    raise AssertionError("they do not wait")


class AppendAside:
    """An append in a thread of its own."""

    def __init__(self, store: Store, events: Sequence[Event]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(store, events))
        self._thread.start()

    def _run(self, store: Store, events: Sequence[Event]) -> None:
        try:
            store.append(events)
        except BaseException as error:
            self.error = error

    def result(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error:
            raise self.error


@pytest.mark.parametrize("theirs", [[1, 2, 3], [7, 7, 7]], ids=["same", "other"])
def test_a_turn_that_another_is_just_writing_counts_as_that_one_wrote_it(
    postgres_server: postgres.Server, postgres_url: str, theirs: list[int]
) -> None:
    first = make_turn("t0", new=theirs)
    mine = make_turn("t0", new=[1, 2, 3])
    child = make_turn("t1", parent=mine)
    given = Reward(rollout_id="r", value=1.0)
    with Store.open(postgres_url) as store, Store.open(postgres_url) as other:
        store.append([RolloutStarted(rollout_id="r")])
        with store.appending() as connection:
            row = {"reward_id": given.reward_id, "rollout_id": "r", "value": 0.0}
            row |= {"name": "n", "source": "s", "created_at": 0.0}
            connection.execute(insert(Rewards), row)
            writing = AppendAside(other, [first, given])  # its turn is written; its reward waits
            waiting_for_a_lock(postgres_server, postgres_url)
            second = AppendAside(store, [mine, child])  # waits for the turn
            waiting_for_a_lock(postgres_server, postgres_url, 2)
        writing.result()
        if first.prompt_token_ids == mine.prompt_token_ids:
            second.result()
            assert [turn.turn_id for turn in store.rollout_turns("r")] == ["t0", "t1"]
        else:
            with pytest.raises(EventRejected, match="t1 does not begin with"):
                second.result()
            assert [turn.prompt_token_ids for turn in store.rollout_turns("r")] == [
                first.prompt_token_ids
            ]


def test_nobody_comes_between_reading_what_is_stored_and_writing_by_it(
    postgres_server: postgres.Server, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(postgres_url) as store, Store.open(postgres_url) as other:
        store.append([make_turn("t0")])
        asides: list[AppendAside] = []

        def read(connection: Connection, turn_ids: Iterable[str]) -> dict[str, ParentInfo]:
            found = parent_cache.load_parents(connection, turn_ids)
            if not asides:
                asides.append(AppendAside(other, [make_turn("t1")]))
                waiting_for_a_lock(postgres_server, postgres_url)
            return found

        monkeypatch.setattr("tracegrad.store.write.events.load_parents", read)
        store.append([make_turn("t0"), make_turn("t1")])
        asides[0].result()
        assert [turn.turn_id for turn in store.rollout_turns("r")] == ["t0", "t1"]


def test_of_two_openings_at_once_one_counts_with_all_its_tags(
    postgres_server: postgres.Server, postgres_url: str
) -> None:
    first = RolloutStarted(rollout_id="r", task_id="first", tags={"a": "1"})
    second = RolloutStarted(rollout_id="r", task_id="second", tags={"b": "2"})
    with Store.open(postgres_url) as store, Store.open(postgres_url) as other:
        store.append([make_turn("t")])
        with store.appending() as connection:
            connection.execute(update(Rollouts).values(agent="nobody"))  # holds the row
            asides = [AppendAside(other, [second])]
            waiting_for_a_lock(postgres_server, postgres_url)
            asides.append(AppendAside(store, [first]))
            waiting_for_a_lock(postgres_server, postgres_url, 2)
        for aside in asides:
            aside.result()
        row = store.rollout("r").summary
        assert (row.task_id, row.tags) in [("first", {"a": "1"}), ("second", {"b": "2"})]


def test_transactions_that_lock_each_other_out_are_tried_again(
    postgres_server: postgres.Server, postgres_url: str
) -> None:
    """Held in one order by us, wanted in the other by an append, which PostgreSQL then ends."""
    with Store.open(postgres_url) as store, Store.open(postgres_url) as other:
        store.append([RolloutStarted(rollout_id="a"), RolloutStarted(rollout_id="b")])
        with store.appending() as connection:
            # The other is the victim.
            connection.execute(text("SET LOCAL deadlock_timeout = '60s'"))
            hold = update(Rollouts).values(agent="me")
            connection.execute(hold.where(Rollouts.rollout_id == "b"))
            ends = [RolloutFinished(rollout_id=name) for name in "ab"]
            aside = AppendAside(other, ends)
            waiting_for_a_lock(postgres_server, postgres_url)
            connection.execute(hold.where(Rollouts.rollout_id == "a"))
        aside.result()
        assert [row.outcome for row in store.rollouts()] == ["completed", "completed"]
        assert {row.agent for row in store.rollouts()} == {"me"}


def test_a_lease_that_is_locked_out_is_tried_again(
    postgres_server: postgres.Server, postgres_url: str
) -> None:
    with Store.open(postgres_url) as store, Store.open(postgres_url) as other:
        for name in "ab":
            store.append(rollout_events(name))
        with store.appending() as connection, ThreadPoolExecutor(1) as pool:
            connection.execute(text("SET LOCAL deadlock_timeout = '60s'"))
            hold = update(Rollouts).values(agent="me")
            connection.execute(hold.where(Rollouts.rollout_id == "b"))
            leasing = pool.submit(Ledger(other).lease, groups=1, group_size=2, owner="me", ttl_s=60)
            waiting_for_a_lock(postgres_server, postgres_url)
            connection.execute(hold.where(Rollouts.rollout_id == "a"))
            connection.commit()
            [group] = leasing.result(30)
        assert [rollout.rollout_id for rollout in group.rollouts] == ["a", "b"]
        assert len(Ledger(store).leases("a")) == 1

"""Migrations build the declared tables, and another database accepts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import String, inspect, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

import tracegrad.store
from support.store.events import make_turn
from support.store.old_stores import insert_row, old_row, upgraded
from tracegrad.events import Outcome, RolloutFinished, RolloutStarted
from tracegrad.store import (
    Ledger,
    PolicyVersion,
    StepRecord,
    Store,
    StoreForeign,
    StoreMissing,
)
from tracegrad.store.databases import database_at
from tracegrad.store.models import REVISION, Base, Leases, Rollouts


def test_the_migrations_build_exactly_the_declared_tables(store: Store) -> None:
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_a_new_stores_rows_end_with_what_is_seldom_read(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, store.reading() as connection:
        assert inspect(connection).get_columns("turns")[-1]["name"] == "routed_experts"


def test_every_text_is_compared_by_its_bytes(postgres_url: str) -> None:
    with Store.open(postgres_url) as store, store.reading() as connection:
        for table in Base.metadata.sorted_tables:
            texts = [c for c in inspect(connection).get_columns(table.name)
                     if isinstance(c["type"], String)]  # fmt: skip
            found = {c["name"]: getattr(c["type"], "collation", None) for c in texts}
            assert set(found.values()) <= {"C"}, table.name
            declared = {c.name: c.type.dialect_impl(connection.dialect) for c in table.columns}
            assert {declared[name].collation for name in found} <= {"C"}, table.name


def test_the_code_names_the_newest_migration() -> None:
    config = Config()
    folder = Path(tracegrad.store.__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder))
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


def test_a_store_opens_again_with_what_was_in_it(store: Store, url: str) -> None:
    store.append([make_turn("t")])
    with Store.open(url) as again:
        assert again.find_turn("t") == make_turn(
            "t", created_at=store.rollout_turns("r")[0].created_at
        )


def test_durability_settings_hold_on_every_connection_to_sqlite(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, store.reading(), store.reading() as second:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)):
            assert second.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def shown(store: Store, setting: str) -> str:
    with store.reading(), store.appending() as second:
        return str(second.exec_driver_sql(f"SHOW {setting}").scalar())


def test_settings_hold_on_every_connection_to_postgresql(postgres_url: str) -> None:
    with Store.open(postgres_url, busy_timeout_s=2) as store:
        assert shown(store, "lock_timeout") == "2s"
        assert shown(store, "idle_in_transaction_session_timeout") == "20s"
        assert shown(store, "client_encoding") == "UTF8"
        assert shown(store, "synchronous_commit") == "on", "the tests' server has it off"


def test_only_its_own_url_may_make_a_store_less_durable(postgres_url: str) -> None:
    with Store.open(f"{postgres_url}&options=-csynchronous_commit%3Doff") as store:
        assert shown(store, "synchronous_commit") == "off"
        assert shown(store, "lock_timeout") == "30s"


def test_texts_are_compared_by_their_bytes_in_every_database(store: Store) -> None:
    names = ["b", "B", "a", "é", "Z", "z\U0001f600", "z\uffff", "_", "-a"]
    store.append([RolloutStarted(rollout_id=name) for name in names])
    with store.reading() as connection:
        stored = list(connection.scalars(select(Rollouts.rollout_id).order_by(Rollouts.rollout_id)))
    assert stored == sorted(names)


def test_tables_of_another_program_are_left_alone(empty_url: str) -> None:
    engine = database_at(empty_url).engine(busy_timeout_s=5)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('abc')"))
    engine.dispose()
    with pytest.raises(StoreMissing, match="no store at"):
        Store.open(empty_url, create=False)
    with pytest.raises(StoreForeign, match=r"another program's tables \(alembic_version\)"):
        Store.open(empty_url)


def test_postgresql_can_compile_the_tables() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in Base.metadata.sorted_tables:
        ddl = str(CreateTable(table).compile(dialect=dialect))
        assert table.name in ddl
        assert all(CreateIndex(index).compile(dialect=dialect).string for index in table.indexes)
    turns = str(CreateTable(Base.metadata.tables["turns"]).compile(dialect=dialect))
    assert "seq BIGSERIAL" in turns


# A store of revision 0001, as its code wrote it


def test_a_store_of_the_first_revision_goes_on(empty_url: str) -> None:
    said = [{"role": "user", "content": "é " * 300}, {"role": "assistant", "content": "ok " * 99}]
    request = {"messages": said[:1], "seed": 2**70}
    root = make_turn("t0", request=request, response={"choices": [{"message": said[1]}]})
    child = make_turn("t1", parent=root, request={"messages": said})
    engine = database_at(empty_url).engine(busy_timeout_s=5)
    with engine.begin() as connection:
        upgraded(connection, "0001")
        assert "rollout_keys" not in inspect(connection).get_table_names()
        insert_row(connection, "rollouts", {"rollout_id": "r", "opened": True, "opened_at": 1.0})
        insert_row(connection, "turns", old_row(root, 0))
        insert_row(connection, "turns", old_row(child, 5))
    engine.dispose()

    with Store.open(empty_url) as store:
        assert store.rollout_turns("r") == [root, child]
        last = child
        for number in range(2, 5):
            said = [*said, {"role": "user", "content": f"{number} " * 200}]
            last = make_turn(f"t{number}", parent=last, request={"messages": said})
            store.append([last])
            assert store.find_turn(last.turn_id) == last
        store.append([root, child])
        assert [turn.turn_id for turn in store.rollout_turns("r")] == ["t0", "t1", "t2", "t3", "t4"]
        store.add_key("r", b"0" * 32)
        with store.reading() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []
            bases = connection.execute(text("SELECT request_base FROM turns ORDER BY seq"))
            assert list(bases.scalars()) == [None, None, None, "t2", "t3"]


def test_ends_leases_and_versions_of_the_second_revision_become_events(empty_url: str) -> None:
    engine = database_at(empty_url).engine(busy_timeout_s=5)
    with engine.begin() as connection:
        upgraded(connection, "0002")
        tables = inspect(connection).get_table_names()
        assert not {"outcomes", "leases", "version_events", "removals"} & set(tables)
        ends: list[dict[str, object]] = [
            {"finished_at": 5.0, "outcome": "completed"},
            {"finished_at": 4.0, "outcome": "agent_error", "error": "boom é"},
            {},
        ]
        for name, end in zip("abc", ends, strict=True):
            row = {"rollout_id": name, "opened": True, "opened_at": 1.0, "task_id": "t"}
            insert_row(connection, "rollouts", row | end)
            insert_row(
                connection,
                "rollout_tags",
                {"rollout_id": name, "key": "é", "value": "ö", "position": 0},
            )
            turn = make_turn(f"{name}.t", name, created_at=2.0)
            insert_row(connection, "turns", old_row(turn, 0))
            insert_row(
                connection,
                "rewards",
                {
                    "reward_id": name,
                    "rollout_id": name,
                    "value": 0.5,
                    "name": "reward",
                    "source": "agent",
                    "created_at": 3.0,
                },
            )
        for version, state in ((0, "serving"), (1, "failed")):
            insert_row(
                connection,
                "policy_versions",
                {"version": version, "state": state, "created_at": 6.0, "detail": '{"why": "é"}'},
            )
    engine.dispose()

    with Store.open(empty_url) as store:
        assert store.outcomes("a") == [RolloutFinished(rollout_id="a", finished_at=5.0)]
        assert store.outcomes("b") == [
            RolloutFinished(
                rollout_id="b", outcome=Outcome.AGENT_ERROR, error="boom é", finished_at=4.0
            )
        ]
        assert store.outcomes("c") == []
        serving = PolicyVersion(0, None, "serving", 6.0, {"why": "é"})
        assert store.version_events(0) == [serving]
        assert store.versions()[1].state == "failed"
        for name in "abc":
            detail = store.rollout(name)
            assert detail.turns == [make_turn(f"{name}.t", name, created_at=2.0)]
            assert (detail.summary.tags, detail.summary.reward) == ({"é": "ö"}, 0.5)
        # And it goes on: events are added, rollouts are leased.
        store.append([RolloutFinished(rollout_id="b", finished_at=9.0)])
        assert [end.finished_at for end in store.outcomes("b")] == [4.0, 9.0]
        store.record_version(serving)
        assert store.version_events(0) == [serving, serving]
        [group] = Ledger(store).lease(groups=1, group_size=2, owner="me", ttl_s=60)
        assert [rollout.rollout_id for rollout in group.rollouts] == ["b", "a"]
        with store.reading() as connection:
            assert connection.scalar(select(Leases.owner).where(Leases.rollout_id == "a")) == "me"
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []


def test_steps_of_before_the_seventh_revision_have_no_digests(empty_url: str) -> None:
    engine = database_at(empty_url).engine(busy_timeout_s=5)
    with engine.begin() as connection:
        upgraded(connection, "0006")
        assert "run_id" not in [c["name"] for c in inspect(connection).get_columns("steps")]
        row = {"step": 1, "version": 1, "created_at": 2.0, "checkpoint": "state/step-00000001"}
        insert_row(connection, "steps", {**row, "settings": "{}", "metrics": "{}"})
    engine.dispose()

    with Store.open(empty_url) as store:
        ledger = Ledger(store)
        old = StepRecord(step=1, version=1, created_at=2.0, checkpoint="state/step-00000001")
        assert ledger.last_step() == old
        new = StepRecord(step=2, version=2, run_id="run", manifest_digest="22")
        ledger.commit_step(new, trained=[], skipped={}, rollouts=[])
        assert ledger.steps() == [old, new]


def test_what_givers_of_the_seventh_revision_said_of_themselves_is_kept_as_that(
    empty_url: str,
) -> None:
    engine = database_at(empty_url).engine(busy_timeout_s=5)
    with engine.begin() as connection:
        upgraded(connection, "0007")
        insert_row(connection, "rollouts", {"rollout_id": "r", "opened": True, "opened_at": 1.0})
        # The first was given last, and says that it was given in 5138.
        for reward_id, value, source, at in (
            ("w0", 1.0, "judge", 1e11),
            ("w1", 0.0, "agent", 3.0),
            ("w2", 1e308, "agent", 4.0),
        ):
            row = {"reward_id": reward_id, "rollout_id": "r", "value": value, "name": "reward"}
            insert_row(connection, "rewards", row | {"source": source, "created_at": at})
        key = {"key_hash": b"k" * 32, "rollout_id": "r", "created_at": 1.0}
        insert_row(connection, "rollout_keys", key)
    engine.dispose()

    with Store.open(empty_url) as store:
        said = [(r.source, r.label, r.given_at, r.created_at) for r in store.rewards("r")]
        assert said == [
            ("claimed", "judge", 1e11, 1e11),
            ("claimed", "agent", 3.0, 3.0),
            ("claimed", "agent", 4.0, 4.0),
        ]
        assert store.rollout("r").summary.reward == 0.0, (
            "the last to arrive that would be taken today"
        )
        assert store.key_owner(b"k" * 32) == ("r", "calls")
        with store.reading() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []

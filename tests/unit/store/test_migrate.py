"""Migrations build the declared tables, and another database accepts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import String, inspect, make_url, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

import tracegrad.store
from support.store.events import make_turn
from support.store.ledger_fixtures import commit
from support.store.old_stores import (
    export_of_revision_0009,
    first_revision_row,
    insert_row,
    write_store_of_revision_0009,
)
from tracegrad.events import RolloutStarted
from tracegrad.store import (
    Ledger,
    Store,
    StoreForeign,
    StoreMissing,
    StoreTooOld,
)
from tracegrad.store.anchors.anchor_store import AnchorStore
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad.store.databases import database_at
from tracegrad.store.maintenance import examine
from tracegrad.store.models import REVISION, Base, Rollouts
from tracegrad.transfer.export_rollouts import RolloutExport


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
    database = database_at(empty_url)
    database.prepare(create=True)
    engine = database.engine(busy_timeout_s=5)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('abc')"))
    engine.dispose()
    with pytest.raises((StoreMissing, StoreForeign), match=r"no store at|another program's tables"):
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


# Stores as earlier versions wrote them


OPENS = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
from tracegrad.store import Store
Store.open(sys.argv[1]).close()
"""


def test_a_log_tells_of_a_migration_and_not_of_what_carries_it_out(sqlite_url: str) -> None:
    """A process of its own: Alembic tells of its parts when it is first imported."""

    def said() -> str:
        opened = subprocess.run(
            [sys.executable, "-c", OPENS, sqlite_url], capture_output=True, text=True, check=True
        )
        return opened.stderr

    assert said() == "", "a new store"
    file = Path(str(make_url(sqlite_url).database))
    file.unlink()
    write_store_of_revision_0009(sqlite_url)
    file.chmod(0o600)
    done = f"the store has been brought from revision 0009 to {REVISION}"
    assert said() == f"tracegrad.store INFO {done}\n"
    assert said() == ""


def test_a_store_of_the_first_release_opens_and_goes_on(empty_url: str) -> None:
    write_store_of_revision_0009(empty_url)
    written = export_of_revision_0009(empty_url)
    with Store.open(empty_url, create=False) as store:
        assert examine(store).ok
        # The word for turns that another rollout took has changed since.
        assert list(RolloutExport(store=store).rollouts()) == [_with_new_words(o) for o in written]
        assert not any(each.held_out for each in store.rollouts())
        [copy] = [each for each in store.rollouts() if each.tags.get("anchor_task") == "climb"]
        assert {turn.sampling["source"] for turn in store.rollout_turns(copy.rollout_id)} == {
            "demonstration"
        }
        anchors = AnchorStore(store, AnchorSettings(window=2, threshold=1.0, group_size=2))
        assert anchors.task_state("climb").demonstration == "e"
        assert [one.rollout_id for one in anchors.task_state("climb").pending] == [copy.rollout_id]
        assert [found.demonstration for found in anchors.next("climb", count=3)] == ["e"] * 3

        ledger = Ledger(store)
        assert [(lease.owner, lease.state(0.0)) for lease in ledger.leases("trained")] == [
            ("trainer", "released")
        ]
        groups = ledger.lease(groups=2, group_size=2, owner="me", ttl_s=60, at_least=1)
        assert [[each.rollout_id for each in group.rollouts] for group in groups] == [["a", "b"]]
        commit(ledger, groups, step=2)
        assert [step.step for step in ledger.steps()] == [1, 2]
        last = store.rollout_turns("a")[1]
        store.append([make_turn("a.3", "a", parent=last, request=last.request)])
        assert store.find_turn("a.3") is not None
        assert examine(store).ok
        with store.reading() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []


def _with_new_words(written: Any) -> Any:
    if isinstance(written, dict):
        return {
            key: "demonstration" if (key, value) == ("source", "expert") else _with_new_words(value)
            for key, value in written.items()
        }
    return [_with_new_words(each) for each in written] if isinstance(written, list) else written


def test_rows_as_the_first_revision_packed_them_are_read_and_continued(store: Store) -> None:
    chat = [{"role": "user", "content": "é " * 300}, {"role": "assistant", "content": "ok " * 99}]
    request = {"messages": chat[:1], "seed": 2**70}
    root = make_turn("t0", request=request, response={"choices": [{"message": chat[1]}]})
    child = make_turn("t1", parent=root, request={"messages": chat})
    with store.appending() as connection:
        insert_row(connection, "rollouts", {"rollout_id": "r", "opened": True, "opened_at": 1.0})
        insert_row(connection, "turns", first_revision_row(root, 0))
        insert_row(connection, "turns", first_revision_row(child, 5))
    assert store.rollout_turns("r") == [root, child]
    last = child
    for number in range(2, 5):
        chat = [*chat, {"role": "user", "content": f"{number} " * 200}]
        last = make_turn(f"t{number}", parent=last, request={"messages": chat})
        store.append([last])
        assert store.find_turn(last.turn_id) == last
    store.append([root, child])
    assert [turn.turn_id for turn in store.rollout_turns("r")] == ["t0", "t1", "t2", "t3", "t4"]
    with store.reading() as connection:
        bases = connection.execute(text("SELECT request_base FROM turns ORDER BY seq"))
        assert list(bases.scalars()) == [None, None, None, "t2", "t3"]


@pytest.mark.parametrize("revision", ["0001", "0008"])
def test_a_store_of_before_the_first_release_says_what_to_do(
    store: Store, url: str, revision: str
) -> None:
    with store.appending() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
    with pytest.raises(StoreTooOld, match=rf"revision {revision}.*commit ee1289f.*another URL"):
        Store.open(url)

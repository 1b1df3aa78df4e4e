"""Migrations build the declared tables, and another database accepts them."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from store_facts import make_turn

import tracegrad.store
from tracegrad.store import Store
from tracegrad.store.schema import REVISION, Base


def test_the_migrations_build_exactly_the_declared_tables(store: Store) -> None:
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


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


def test_durability_settings_hold_on_every_connection(store: Store) -> None:
    with store.reading(), store.reading() as second:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)):
            assert second.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_postgresql_can_compile_the_tables() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in Base.metadata.sorted_tables:
        ddl = str(CreateTable(table).compile(dialect=dialect))
        assert table.name in ddl
        assert all(CreateIndex(index).compile(dialect=dialect).string for index in table.indexes)
    turns = str(CreateTable(Base.metadata.tables["turns"]).compile(dialect=dialect))
    assert "seq BIGSERIAL" in turns

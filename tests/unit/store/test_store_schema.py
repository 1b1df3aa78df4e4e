"""Migrations build the declared tables, and another database accepts them."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from pathlib import Path

import zstandard
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from store_facts import make_turn

import tracegrad.store
from tracegrad.records import Turn
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


# A store of revision 0001, as its code wrote it

_COMPRESS = zstandard.ZstdCompressor(level=3).compress


def _old_row(turn: Turn, known: int) -> dict[str, object]:
    context = turn.prompt_token_ids + turn.completion_token_ids
    return {
        "turn_id": turn.turn_id,
        "rollout_id": turn.rollout_id,
        "parent_id": turn.parent_id,
        "dialect": turn.dialect,
        "model": turn.model,
        "prompt_tokens": len(turn.prompt_token_ids),
        "completion_tokens": len(turn.completion_token_ids),
        "context_digest": hashlib.blake2b(_bytes(context), digest_size=16).digest(),
        "delta": _COMPRESS(_bytes(turn.prompt_token_ids[known:])),
        "completion": _COMPRESS(_bytes(turn.completion_token_ids)),
        "logprobs": _COMPRESS(_bytes(turn.completion_logprobs)),
        "policy_versions": json.dumps(turn.policy_versions),
        "last_version": 0,
        "sampling": json.dumps(turn.sampling),
        "request": _COMPRESS(json.dumps(turn.request).encode()),
        "response": _COMPRESS(json.dumps(turn.response).encode()),
        "created_at": turn.created_at,
    }


def _bytes(values: array[int] | array[float]) -> bytes:
    return struct.pack(f"<{len(values)}{values.typecode}", *values)


def _insert(connection: Connection, table: str, row: dict[str, object]) -> None:
    names = ", ".join(row)
    marks = ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), row)


def test_a_store_of_the_first_revision_goes_on(url: str) -> None:
    said = [{"role": "user", "content": "é " * 300}, {"role": "assistant", "content": "ok " * 99}]
    request = {"messages": said[:1], "seed": 2**70}
    root = make_turn("t0", request=request, response={"choices": [{"message": said[1]}]})
    child = make_turn("t1", parent=root, request={"messages": said})
    engine = create_engine(url)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option(
            "script_location", str(Path(tracegrad.store.__file__).parent / "migrations")
        )
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        assert "rollout_keys" not in inspect(connection).get_table_names()
        _insert(connection, "rollouts", {"rollout_id": "r", "opened": True, "opened_at": 1.0})
        _insert(connection, "turns", _old_row(root, 0))
        _insert(connection, "turns", _old_row(child, 5))
    engine.dispose()

    with Store.open(url) as store:
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

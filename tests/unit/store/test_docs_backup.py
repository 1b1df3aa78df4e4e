"""What docs/store.md says about making a database and about copies of one."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from support.store import postgres_server as postgres
from support.store.events import make_turn, rollout_events
from tracegrad.store import GroupCommitWriter, Ledger, Store


def run(server: postgres.Server, command: str) -> None:
    """One of PostgreSQL's programs, as the server's superuser."""
    program, *words = command.split()
    user = {"PGHOST": str(server.folder), "PGUSER": "tests"}
    subprocess.run(
        [postgres.programs() / program, *words], check=True, env={**os.environ, **user}, timeout=60
    )


def test_the_recipe_makes_a_database_that_works(postgres_server: postgres.Server) -> None:
    run(postgres_server, "createuser recipe")
    run(postgres_server, "createdb --owner recipe --encoding UTF8 --template template0 recipe")
    url = postgres_server.url("recipe").replace("//tests@", "//recipe@")
    try:
        with Store.open(url) as store:
            store.append(rollout_events("r"))
            assert Ledger(store).lease(groups=1, group_size=1, owner="me", ttl_s=60)
    finally:
        postgres_server.drop(url)
        run(postgres_server, "dropuser recipe")


def test_a_dump_of_postgresql_comes_back(
    postgres_server: postgres.Server, postgres_url: str, empty_postgres_url: str, tmp_path: Path
) -> None:
    dump = tmp_path / "backup.dump"
    with Store.open(postgres_url) as store, store.appending():
        store.append(rollout_events("r"))
        run(postgres_server, f"pg_dump --format=custom --file={dump} {postgres_url}")
        store.append(rollout_events("later"))
        run(postgres_server, f"pg_restore --no-owner --dbname={empty_postgres_url} {dump}")
        with Store.open(empty_postgres_url, create=False) as copy:
            assert [row.rollout_id for row in copy.rollouts()] == ["r"]
            assert copy.rollout_turns("r") == store.rollout_turns("r")
            copy.append([make_turn("t", "s")])


@pytest.mark.parametrize("how", ["VACUUM INTO", ".backup"])
def test_a_copy_of_sqlite_is_of_one_moment(sqlite_url: str, tmp_path: Path, how: str) -> None:
    copied = tmp_path / "backup.db"
    with Store.open(sqlite_url) as store, GroupCommitWriter(store) as writer:
        writer.submit(rollout_events("r")).result()
        submitted = [writer.submit(rollout_events(f"r{n}")) for n in range(50)]
        with sqlite3.connect(tmp_path / "store.db") as source:
            if how == "VACUUM INTO":
                source.execute(f"VACUUM INTO '{copied}'")
            else:
                with sqlite3.connect(copied) as target:
                    source.backup(target)
        for future in submitted:
            future.result()
    with Store.open(f"sqlite:///{copied}", create=False) as copy:
        rows = copy.rollouts(limit=None)
        assert rows
        assert {(row.turns, row.outcome) for row in rows} == {(2, "completed")}
        copy.append([make_turn("t", "s")])

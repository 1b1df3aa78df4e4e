"""A full disk, a locked or broken file: one clear line, and nothing half-stored."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, insert, text

from support.store.events import make_turn
from tracegrad.events import Turn
from tracegrad.store import (
    GroupCommitWriter,
    Ledger,
    Store,
    StoreMissing,
    StoreTooNew,
    StoreUnavailable,
)
from tracegrad.store.models import Rollouts


@pytest.fixture
def full(sqlite_url: str) -> Iterator[Store]:
    """A store whose file may not grow; `PRAGMA max_page_count` fails as a full disk does."""
    store = Store.open(sqlite_url)
    with store.appending() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

    def limit(connection: sqlite3.Connection, _record: object, _proxy: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(store._engine, "checkout", limit)
    with store:
        yield store


def _big(turn_id: str) -> Turn:
    return make_turn(turn_id, new=(random.randrange(2**31) for _ in range(20_000)))


def test_a_full_disk_is_one_line_and_passes(full: Store, sqlite_url: str) -> None:
    with GroupCommitWriter(full) as writer:
        futures = [writer.submit([_big(f"t{n}")]) for n in range(3)]
        for future in futures:
            with pytest.raises(StoreUnavailable, match="database or disk is full") as caught:
                future.result(timeout=30)
            assert "\n" not in str(caught.value)
            assert "store.db" in str(caught.value)
        assert full.rollouts() == []
        with Store.open(sqlite_url) as roomy:
            roomy.append([_big("t0")])
        assert [t.turn_id for t in full.rollout_turns("r")] == ["t0"]


def test_a_locked_store_is_one_line(url: str) -> None:
    with (
        Store.open(url) as holder,
        Store.open(url, busy_timeout_s=0.1) as store,
        GroupCommitWriter(store) as writer,
    ):
        with holder.appending() as connection:
            connection.execute(
                insert(Rollouts), {"rollout_id": "r", "opened": False, "opened_at": 1}
            )
            with pytest.raises(StoreUnavailable, match="lock") as caught:
                writer.submit([make_turn("t")]).result(timeout=30)
            assert "\n" not in str(caught.value)
            assert store.rollouts() == [], "reading goes on"
        writer.submit([make_turn("t")]).result(timeout=30)
        assert [turn.turn_id for turn in store.rollout_turns("r")] == ["t"]


def test_two_that_want_to_be_alone_wait_for_each_other_and_not_for_ever(url: str) -> None:
    with Store.open(url) as holder, Store.open(url, busy_timeout_s=0.1) as store:
        with holder.exclusive():
            with pytest.raises(StoreUnavailable, match="lock"):
                Ledger(store).release([])
            assert store.rollouts() == []
        Ledger(store).release([])


def test_nothing_is_written_to_a_file_that_nobody_finds(sqlite_url: str, tmp_path: Path) -> None:
    """SQLite would go on in the removed one, and a new connection make an empty one."""
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    away = tmp_path / "away"
    away.mkdir()
    with Store.open(sqlite_url) as store:
        store.append([make_turn("before")])
        beside = [file.with_name(f"{file.name}{end}") for end in ("", "-wal", "-shm")]
        for each in beside:
            each.rename(away / each.name)
        for _ in range(2):  # by the connection that was open, and by a new one
            with pytest.raises(StoreUnavailable, match=r"store\.db: ") as caught:
                store.append([make_turn("lost")])
            assert "\n" not in str(caught.value)
            with pytest.raises(StoreUnavailable):
                store.rollout_turns("r")
            assert not file.exists()
        for each in beside:
            (away / each.name).rename(each)
        store.append([make_turn("after")])
        assert [turn.turn_id for turn in store.rollout_turns("r")] == ["before", "after"]


def test_a_file_that_was_replaced_is_the_store_from_then_on(
    sqlite_url: str, tmp_path: Path
) -> None:
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    with Store.open(f"sqlite:///{tmp_path}/other.db") as other:
        other.append([make_turn("another")])
    with Store.open(sqlite_url) as store:
        store.append([make_turn("t")])
        file.with_name(f"{file.name}-wal").unlink()
        (tmp_path / "other.db").replace(file)
        with pytest.raises(StoreUnavailable, match="was removed or replaced while it was open"):
            store.append([make_turn("t2")])
        assert [turn.turn_id for turn in store.rollout_turns("r")] == ["another"]


def test_a_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a b#ü%20" / "100%"
    with Store.open("sqlite:///a b#ü%2520/100%25/s&=.db") as store:  # as a URL has it
        monkeypatch.chdir("/")  # as an agent may
        store.append([make_turn("t")])
        assert [path.name for path in folder.iterdir() if path.suffix == ".db"] == ["s&=.db"]
        assert len(store.rollout_turns("r")) == 1


def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("shopping list " * 1000)
    with pytest.raises(StoreUnavailable, match=r"notes\.txt: file is not a database"):
        Store.open(f"sqlite:///{path}")
    assert path.read_text().startswith("shopping"), "it was left alone"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"file"):
        Store.open(f"sqlite:///{tmp_path / 'file' / 'store.db'}")


def test_a_missing_store_is_not_made_for_a_reader(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match="no store at"):
        Store.open(f"sqlite:///{tmp_path / 'a' / 'store.db'}", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["store.db", "sqlite://", "sqlite:///:memory:", "mysql://h/db"])
def test_a_useless_url_says_what_to_write(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///PATH"):
        Store.open(url)


def test_a_store_from_the_future_is_left_alone(store: Store, url: str) -> None:
    with store.appending() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreTooNew, match=r"revision 9999.*upgrade tracegrad"):
        Store.open(url)

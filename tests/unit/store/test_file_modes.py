"""What holds prompts is its owner's alone, whatever the umask."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.system.log_lines import our_lines
from tracegrad.atomic_file import atomic_write
from tracegrad.events import RolloutStarted
from tracegrad.store import Store
from tracegrad.store.errors import StoreError, StoreMissing

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def lax() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}


def write(url: str, name: str = "r1") -> Store:
    store = Store.open(url)
    store.append([RolloutStarted(rollout_id=name)])
    return store


def test_a_new_store_its_log_and_its_folder(tmp_path: Path) -> None:
    store = write(f"sqlite:///{tmp_path}/a/b/store.db")
    assert modes(tmp_path) == {
        "a": 0o700,
        "a/b": 0o700,
        "a/b/store.db": 0o600,
        "a/b/store.db-wal": 0o600,
        "a/b/store.db-shm": 0o600,
    }
    store.close()


def test_an_older_laxer_one_is_closed_with_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ".tracegrad"
    store = write(f"sqlite:///{folder}/store.db")
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "tracegrad"):
        write(f"sqlite:///{folder}/store.db", "r2").close()
    store.close()
    assert set(modes(tmp_path).values()) == {0o700, 0o600}
    said = our_lines(caplog)
    assert len(said) == 4
    assert f"{folder}/store.db is open to other users (mode 0644)" in said[0]
    caplog.clear()
    write(f"sqlite:///{folder}/store.db", "r3").close()
    assert our_lines(caplog) == []


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("kind", ["database", "text"])
def test_a_file_that_is_no_store_stays_as_it_is(tmp_path: Path, kind: str, create: bool) -> None:
    file = tmp_path / "theirs.db"
    if kind == "database":
        with closing(sqlite3.connect(file)) as theirs:
            theirs.execute("CREATE TABLE addresses (name TEXT)")
    else:
        file.write_text("notes, and no database at all\n" * 100)
    file.chmod(0o644)
    before = file.read_bytes()
    with pytest.raises(StoreError, match="give the store a file of its own"):
        Store.open(f"sqlite:///{file}", create=create)
    assert file.read_bytes() == before
    assert modes(tmp_path) == {"theirs.db": 0o644}


def test_a_folder_that_others_share_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    write(f"sqlite:///{shared}/store.db").close()
    assert modes(tmp_path) == {"shared": 0o755, "shared/store.db": 0o600}


def test_another_users_is_told_and_not_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's file")
    write(f"sqlite:///{tmp_path}/store.db").close()
    file = tmp_path / "store.db"
    file.chmod(0o644)
    os.chown(file, 65534, 65534)
    Store.open(f"sqlite:///{file}", create=False).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert "not ours to close" in caplog.text


def test_where_there_is_none_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        Store.open(f"sqlite:///{tmp_path}/none/store.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_exports_too(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").touch(0o644)
    for name in ("new.jsonl", "old.jsonl"):
        with atomic_write(tmp_path / name) as file:
            file.write(b"{}\n")
    assert set(modes(tmp_path).values()) == {0o600}


def test_the_commands_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/.tracegrad/store.db"
    write(url).close()
    out = tmp_path / "all.jsonl"
    command = [BIN / "tracegrad", "export", "--store", url, "-o", out]
    subprocess.run(command, check=True, capture_output=True)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600

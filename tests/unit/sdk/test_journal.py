"""The journal keeps every record, in order, until it is acknowledged; its folder has one owner."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad import journal
from tracegrad.journal import (
    Journal,
    JournalFull,
    drop_torn_record,
    journal_folder,
    orphaned_journals,
)

LIMIT = 1 << 30


def records(numbers: range) -> list[bytes]:
    return [b'{"n":%d}' % number for number in numbers]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def mine(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "url", LIMIT)


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=60),
    segment=st.integers(1, 100),
    size=st.integers(1, 100),
)
def test_records_are_read_once_in_order_over_any_number_of_files(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[bool, int]],
    segment: int,
    size: int,
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SEGMENT_BYTES", segment)
        one = Journal(folder / "url", LIMIT)
        put, got = 0, 0
        for appends, count in steps:
            if appends:
                for record in records(range(put, put + count)):
                    one.append(record)
                put += count
            elif (batch := one.read(count, size)) is not None:
                assert batch.records == records(range(got, got + len(batch.records)))
                assert 1 <= len(batch.records) <= count
                got += len(batch.records)
                one.acknowledge(batch)
            else:
                assert got == put
            assert one.is_acknowledged(one.end()) == (got == put)
        target = one.end()
        while (batch := one.read(8, size)) is not None:
            assert not one.is_acknowledged(target)
            got += len(batch.records)
            one.acknowledge(batch)
        assert got == put
        one.close()
        assert files(folder) == []


def test_what_is_acknowledged_takes_no_room(mine: Journal, tmp_path: Path) -> None:
    for _ in range(3):
        for record in records(range(100)):
            mine.append(record)
        batch = mine.read(100, 1 << 20)
        assert batch is not None
        mine.acknowledge(batch)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) == 0


def test_a_folder_is_left_when_its_owner_is_gone_and_not_before(
    mine: Journal, tmp_path: Path
) -> None:
    mine.append(b"{}")
    assert list(orphaned_journals(tmp_path / "url")) == []
    child = os.fork()
    if child == 0:  # closing its copies of the parent's files must not free the parent's lock
        mine.abandon()
        os._exit(0)
    os.waitpid(child, 0)
    assert list(orphaned_journals(tmp_path / "url")) == []
    mine.abandon()
    (left,) = orphaned_journals(tmp_path / "url")
    assert list(orphaned_journals(tmp_path / "url")) == [], "it has an owner again"
    assert list(left.batches(10, 1_000)) == [[b"{}"]]
    left.remove()
    assert files(tmp_path) == []


def test_a_journal_never_holds_the_number_of_a_closed_file(
    mine: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is forked while another thread closes one abandons the journal, which closes
    what it holds: by then the number may be that of the child's own output."""
    closed = []

    def close(fd: int) -> None:
        assert fd not in (mine._write_fd, mine._read_fd, mine._lock_fd)
        closed.append(fd)
        real(fd)

    real = os.close
    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 64)
    for record in records(range(100)):
        mine.append(record)
    while (batch := mine.read(100, 1 << 20)) is not None:
        mine.acknowledge(batch)
    assert len(closed) > 20, "of segments that were written and read"
    mine.append(b"{}")
    assert mine.read(1, 100) is not None
    closed.clear()
    mine.abandon()
    assert len(closed) == 3


def test_the_owner_of_a_folder_may_die_while_others_look(tmp_path: Path) -> None:
    """Each left journal has one new owner, however many look for it at once."""
    for number in range(20):
        one = Journal(tmp_path / "url", LIMIT)
        one.append(b"%d" % number)
        one.abandon()
    found: list[bytes] = []

    def look() -> None:
        for left in orphaned_journals(tmp_path / "url"):
            found.extend(record for batch in left.batches(10, 1_000) for record in batch)
            left.remove()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=int) == [b"%d" % number for number in range(20)]


def test_half_a_record_is_none(mine: Journal, tmp_path: Path) -> None:
    """Its writer was killed in the middle of a write."""
    mine.append(b'{"n":1}')
    mine.append(b'{"n":2}')
    mine.abandon()
    (path,) = tmp_path.rglob("*.jsonl")
    os.truncate(path, path.stat().st_size - 3)
    (left,) = orphaned_journals(tmp_path / "url")
    found = [record for batch in left.batches(10, 1_000) for record in batch]
    assert len(found) == 2
    assert drop_torn_record(found) == [b'{"n":1}']
    left.close()


def test_a_disk_that_is_full_in_the_middle_of_a_record(
    mine: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    mine.append(b'{"n":1}')
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        mine.append(b'{"n":2}')  # into memory
    mine.append(b'{"n":3}')
    (path,) = tmp_path.rglob("*.jsonl")
    assert path.read_bytes() == b'{"n":1}\n', "half a record is taken back"
    found = []
    for _ in range(2):
        while (batch := mine.read(10, 1_000)) is not None:
            found += batch.records
            mine.acknowledge(batch)
        mine.append(b'{"n":4}')  # the disk takes records again
    assert found == [b'{"n":1}', b'{"n":2}', b'{"n":3}', b'{"n":4}']


def test_a_disk_that_takes_nothing_is_logged_when_memory_is_full(
    mine: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal, "MEMORY_BYTES", 10)
    monkeypatch.setattr(os, "open", full)
    mine.append(b"{}")
    with pytest.raises(JournalFull, match="10 bytes wait in memory"):
        mine.append(b'{"n":12345}')


def test_what_a_signal_handler_appends_is_not_acknowledged_with_what_it_interrupted(
    mine: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    seek = os.lseek

    def interrupted(*args: int) -> int:
        position = seek(*args)
        monkeypatch.setattr(os, "lseek", seek)
        mine.append(b'{"n":2}')
        return position

    monkeypatch.setattr(os, "lseek", interrupted)
    mine.append(b'{"n":1}')
    found = []
    while (batch := mine.read(1, 1_000)) is not None:
        found += batch.records
        mine.acknowledge(batch)
    assert found == [b'{"n":1}', b'{"n":2}']


def test_a_file_system_without_locks_is_left_as_it_was(
    mine: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", none)
    mine.append(b"{}")
    assert "no lock is to be had there" in caplog.text
    assert list((tmp_path / "url").iterdir()) == []
    batch = mine.read(10, 1_000)
    assert batch is not None
    assert batch.records == [b"{}"]


def test_a_folder_that_others_may_write_is_not_believed(mine: Journal, tmp_path: Path) -> None:
    mine.append(b"{}")
    mine.abandon()
    (folder,) = (tmp_path / "url").iterdir()
    folder.chmod(0o777)
    assert list(orphaned_journals(tmp_path / "url")) == []


def test_a_file_that_somebody_removed_ends_nothing(mine: Journal, tmp_path: Path) -> None:
    mine.append(b"{}")
    for path in tmp_path.rglob("*.jsonl"):
        path.unlink()
    assert mine.read(10, 1_000) is None
    mine.append(b'{"n":2}')
    batch = mine.read(10, 1_000)
    assert batch is not None
    assert batch.records == [b'{"n":2}']


def test_where_journals_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACEGRAD_JOURNAL", str(tmp_path / "chosen"))
    chosen = journal_folder("http://127.0.0.1:1")
    assert chosen.parent == tmp_path / "chosen"
    assert journal_folder("http://127.0.0.1:2") != chosen
    monkeypatch.delenv("TRACEGRAD_JOURNAL")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert journal_folder("u").parent == tmp_path / "state" / "tracegrad" / "journal"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert journal_folder("u").parent == tmp_path / ".local" / "state" / "tracegrad" / "journal"
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert not journal_folder("u").is_relative_to(tmp_path)


@pytest.mark.parametrize("size", ["1 GB", "-1", "1e9"])
def test_a_wrong_limit_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("TRACEGRAD_JOURNAL_BYTES", size)
    with pytest.raises(ValueError, match=r"TRACEGRAD_JOURNAL_BYTES: .* is no number of bytes"):
        journal.journal_size_limit()


def test_room_of_full_files_is_free_again_once_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 32)
    one = Journal(tmp_path / "url", 200)
    for _ in range(20):
        for record in records(range(10, 20)):
            one.append(record)
        while (batch := one.read(8, 100)) is not None:
            one.acknowledge(batch)


def test_journals_of_other_processes_take_room_too(mine: Journal) -> None:
    [record] = records(range(1))
    mine.others_bytes = LIMIT - len(record) - 1
    mine.append(record)
    with pytest.raises(JournalFull):
        mine.append(record)

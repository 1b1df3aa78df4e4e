"""The record of a run: cut off anywhere, it is read up to its last whole line."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tracegrad.events import Outcome
from tracegrad.runner.attempt import Attempt
from tracegrad.runner.run_record import (
    FILE,
    RecordError,
    RunHeader,
    RunRecord,
    new_run_folder,
)
from tracegrad.runner.scheduler import GroupKey, Ticket

HEADER = RunHeader(tasks="t", attempts=2, over_sample=0, epochs=1, held_out=False)
A, B = GroupKey(0, "a"), GroupKey(1, 'b "quoted"\n')


def attempt(rollout_id: str, outcome: Outcome = Outcome.COMPLETED) -> Attempt:
    return Attempt(rollout_id=rollout_id, task_id="a", outcome=outcome, reason=None, reward=0.5)


def written(folder: Path) -> bytes:
    record = RunRecord.open(folder, HEADER)
    record.begun(Ticket(A, 0), "r0")
    record.begun(Ticket(B, 0), "r1")
    record.ended(Ticket(A, 0), attempt("r0"))
    record.begun(Ticket(A, 1), "r2")
    record.ended(Ticket(B, 0), attempt("r1", Outcome.INFRA_ERROR))
    record.close()
    return (folder / FILE).read_bytes()


def test_a_run_goes_on_with_what_has_ended_and_names_what_was_lost(tmp_path: Path) -> None:
    written(tmp_path)
    record = RunRecord.open(tmp_path, HEADER, resume=True)
    assert record.lost == ["r2"]
    assert record.ended_of(A) == [Outcome.COMPLETED, Outcome.ABORTED]
    assert record.ended_of(B) == [Outcome.INFRA_ERROR]
    assert record.past[0].reward == 0.5
    record.begun(Ticket(A, 2), "r3")
    record.ended(Ticket(A, 2), attempt("r3"))
    record.close()
    again = RunRecord.open(tmp_path, HEADER, resume=True)
    assert again.ended_of(A) == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.ABORTED]
    again.close()


def test_it_may_end_at_any_byte(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole")
    begins = whole.index(b"\n") + 1
    for cut in range(begins, len(whole)):
        folder = tmp_path / str(cut)
        folder.mkdir(mode=0o700)
        (folder / FILE).write_bytes(whole[:cut])
        record = RunRecord.open(folder, HEADER, resume=True)
        ended = whole[:cut].count(b'"attempt"') - (not whole[:cut].endswith(b"\n"))
        assert 0 <= sum(one.outcome is not Outcome.ABORTED for one in record.past) <= ended + 1
        record.begun(Ticket(A, 7), "r7")
        record.close()
        (*_, last) = (folder / FILE).read_bytes().splitlines()
        assert b'"r7"' in last
        RunRecord.open(folder, HEADER, resume=True).close()


def test_a_full_disk_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = RunRecord.open(tmp_path, HEADER)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(RecordError, match="No space left on device: make room, and resume"):
            record.begun(Ticket(A, 0), "r0")
        record.ended(Ticket(A, 0), attempt("r0"))  # what ends with it
    record.close()
    RunRecord.open(tmp_path, HEADER, resume=True).close()


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(RecordError, match="attempts was 2 and is 3 now"):
        RunRecord.open(tmp_path, replace(HEADER, attempts=3), resume=True)
    with pytest.raises(RecordError, match="a run's folder already"):
        RunRecord.open(tmp_path, HEADER)
    with pytest.raises(RecordError, match="name a run's folder"):
        RunRecord.open(tmp_path / "none", HEADER, resume=True)
    (tmp_path / FILE).write_text("no record\n")
    with pytest.raises(RecordError, match="does not begin with a run"):
        RunRecord.open(tmp_path, HEADER, resume=True)


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    lines = written(tmp_path).splitlines(keepends=True)
    for line in (b"garbage\n", b'{"ended": "never begun", "attempt": {}}\n', b"7\n"):
        (tmp_path / FILE).write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
        with pytest.raises(RecordError, match=f"{FILE}:3: no line of a record"):
            RunRecord.open(tmp_path, HEADER, resume=True)


def test_versions_and_evaluations_are_kept(tmp_path: Path) -> None:
    record = RunRecord.open(tmp_path, HEADER)
    record.begun(Ticket(A, 0), "r0")
    record.served(3)
    record.begun(Ticket(A, 1), "r1")
    record.evaluated({"version": 3})
    for number in (0, 1):
        record.ended(Ticket(A, number), attempt(f"r{number}"))
    record.close()
    again = RunRecord.open(tmp_path, HEADER, resume=True)
    assert [(one.rollout_id, one.version) for one in again.past] == [("r0", None), ("r1", 3)]
    assert again.evaluations == [{"version": 3}]
    again.close()


def test_of_two_that_go_on_with_a_run_one_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    first = RunRecord.open(tmp_path, HEADER, resume=True)
    with pytest.raises(RecordError, match="another process is at this run"):
        RunRecord.open(tmp_path, HEADER, resume=True)
    first.close()
    assert (tmp_path / FILE).read_bytes() == before
    RunRecord.open(tmp_path, HEADER, resume=True).close()


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = [new_run_folder(tmp_path / "run") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(not [*folder.iterdir()] for folder in folders)

"""What a run has begun and ended, line by line in a file, so that another run goes on where it was
interrupted.

A line is written before an attempt begins and after it ended. A runner that is killed between any
two writes loses the attempts that were under way, and nothing else: a last line that is not whole
is not read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from tracegrad.events import Outcome
from tracegrad.private_files import FOLDER_MODE, open_private, private_folder
from tracegrad.runner.attempt import Attempt
from tracegrad.runner.driver import RunObserver
from tracegrad.runner.scheduler import GroupKey, Ticket
from tracegrad.runner.task import Task

FILE = "record.jsonl"


class RecordError(ValueError):
    """The run cannot go on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What has to be the same when the run goes on. `tasks`: a digest of them, in their order."""

    tasks: str
    attempts: int
    over_sample: int
    epochs: int
    held_out: bool


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """One that ended in an earlier part of the run. `version`: the policy's that was served when
    it began; None: unknown."""

    ticket: Ticket
    rollout_id: str
    outcome: Outcome
    reward: float | None
    version: int | None = None


def new_run_folder(parent: Path) -> Path:
    """Of this second, and of nobody else. Raises OSError."""
    private_folder(parent)
    begun = time.strftime("%Y-%m-%dT%H-%M-%S")
    for name in chain([begun], (f"{begun}-{number}" for number in count(2))):
        try:
            (parent / name).mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            continue
        return parent / name
    raise AssertionError("numbers end")


class RunRecord(RunObserver):
    """Of one run, in its folder.

    Attributes:
        past: what has ended before.
        lost: rollouts that had begun and not ended when the runner was killed.
        evaluations: that were made before.
    """

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self.folder = folder
        self.past: list[PastAttempt] = []
        self.lost: list[str] = []
        self.evaluations: list[Mapping[str, Any]] = []
        self._file, self._is_full = file, False
        self._groups: defaultdict[GroupKey, list[Outcome]] = defaultdict(list)

    @classmethod
    def open(cls, folder: Path, header: RunHeader, *, resume: bool = False) -> RunRecord:
        """A new one, or one that goes on. Raises RecordError, OSError."""
        path = private_folder(folder) / FILE
        if resume != path.exists():
            fix = "name a run's folder" if resume else "it is a run's folder already: resume it"
            raise RecordError(f"{folder}: {fix}")
        record = cls(folder, open_private(path, "ab"))
        try:
            _lock(folder, record._file)
            if resume:
                lines = _whole_lines(path)
                _check(folder, lines, header)
                record._read(lines)
                record._file.truncate(sum(len(line) + 1 for line in lines))
            else:
                record._write({"run": asdict(header)})
        except BaseException:
            record.close()
            raise
        return record

    def ended_of(self, key: GroupKey) -> Sequence[Outcome]:
        return self._groups.get(key, ())

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        self._write({"begun": rollout_id, "ticket": _ticket_json(ticket)})

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        said = asdict(attempt) | {"logs": None}
        self._write({"ended": attempt.rollout_id, "ticket": _ticket_json(ticket), "attempt": said})

    def served(self, version: int) -> None:
        """What begins from now on begins with this policy version."""
        self._write({"served": version})

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        self._write({"evaluated": evaluation})

    def close(self) -> None:
        with suppress(OSError):  # what is left of a line is not read
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        """Raises RecordError, once: its run ends then, and what ends with it is lost."""
        if self._is_full:
            return
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            self._is_full = True
            said = f"{self.folder / FILE}: {error.strerror}: make room, and resume the run"
            raise RecordError(said) from None

    def _read(self, lines: Iterable[bytes]) -> None:
        """Raises RecordError."""
        begun: dict[str, tuple[Ticket, int | None]] = {}
        version: int | None = None
        for number, line in enumerate(lines, 1):
            try:
                said = json.loads(line)
                if "begun" in said:
                    begun[said["begun"]] = _ticket(said["ticket"]), version
                elif "ended" in said:
                    (ticket, served), attempt = begun.pop(said["ended"]), said["attempt"]
                    outcome = Outcome(attempt["outcome"])
                    past = PastAttempt(ticket, said["ended"], outcome, attempt["reward"], served)
                    self.past.append(past)
                elif "served" in said:
                    version = said["served"]
                elif "evaluated" in said:
                    self.evaluations.append(said["evaluated"])
            except (ValueError, LookupError, TypeError):
                raise RecordError(
                    f"{self.folder / FILE}:{number}: no line of a record; begin a run of its own,"
                    " or take the line out"
                ) from None
        self.lost = [*begun]
        self.past += [
            PastAttempt(ticket, name, Outcome.ABORTED, None) for name, (ticket, _) in begun.items()
        ]
        for past in self.past:
            self._groups[past.ticket.group].append(past.outcome)


def header_of(
    tasks: Sequence[Task], *, attempts: int, over_sample: int, epochs: int, held_out: bool
) -> RunHeader:
    # What a task is, and not where its folders lie on this machine. Its reward, too: attempts of a
    # group that are scored by two measures say nothing.
    text = json.dumps(
        [
            [task.id, task.prompt, task.command, task.agent, task.reward, task.reward_source]
            for task in tasks
        ]
    )
    return RunHeader(
        tasks=hashlib.sha256(text.encode()).hexdigest()[:16],
        attempts=attempts,
        over_sample=over_sample,
        epochs=epochs,
        held_out=held_out,
    )


def _lock(folder: Path, file: BinaryIO) -> None:
    """Until the file is closed, however this process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordError(f"{folder}: another process is at this run; wait for its end") from None


def _whole_lines(path: Path) -> list[bytes]:
    """Those that end; a killed writer leaves one that does not."""
    return path.read_bytes().split(b"\n")[:-1]


def _check(folder: Path, lines: Sequence[bytes], header: RunHeader) -> None:
    """Raises RecordError."""
    try:
        was = json.loads(lines[0])["run"]
    except (IndexError, ValueError, LookupError, TypeError):
        raise RecordError(f"{folder / FILE}: it does not begin with a run") from None
    for field in fields(header):
        before, now = was.get(field.name), getattr(header, field.name)
        if before != now:
            raise RecordError(
                f"{folder}: {field.name} was {before} and is {now} now: the same tasks and options"
                " go on with it, others are a run of their own"
            )


def _ticket_json(ticket: Ticket) -> list[object]:
    return [ticket.group.epoch, ticket.group.task_id, ticket.number]


def _ticket(said: Sequence[Any]) -> Ticket:
    epoch, task_id, number = said
    return Ticket(GroupKey(epoch, task_id), number)

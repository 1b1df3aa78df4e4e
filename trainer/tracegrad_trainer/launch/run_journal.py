"""How each run of a state folder began and how it ended: `<state_dir>/run/journal.jsonl`.

`run_state` holds what goes on and is replaced; this file is appended to and stays. A run writes two
lines, one of its beginning and one of its end. A run of which only the first is there, and whose
process is gone, ended without a word: SIGKILL, out of memory, power.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from tracegrad.events import Json, new_id
from tracegrad.private_files import open_private, private_folder
from tracegrad_trainer.launch.run_state import process_identity, process_is_alive

# Why a run ended: a signal, `max_steps`, an error, `trainer step` had taken its steps or there was
# nothing (more) to train; None: without a word.
Ending = Literal["signal", "max_steps", "error", "done"]
# However many runs a folder has had, so much of the file's end is read: some hundred lines.
_TAIL = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Times are seconds since the epoch."""

    command: str  # "trainer serve" | "trainer step"
    started_at: float
    from_step: int  # the last step that was committed before it; 0: none
    from_version: int
    alive: bool
    ended_at: float | None = None  # None: it runs, or ended without a word
    ending: Ending | None = None
    detail: str = ""  # in words
    at_step: int | None = None  # the last committed step when it ended

    def as_json(self) -> Json:
        return asdict(self)


class RunJournal:
    """Written by the command that holds the folder. A full disk costs the note, not the run."""

    def __init__(self, state_dir: Path, command: str, *, step: int, version: int) -> None:
        self._path = _path(state_dir)
        self._run = new_id()
        self._before = self._path.stat().st_size if self._path.exists() else None  # bytes
        self._append(
            command=command,
            from_step=step,
            from_version=version,
            at=time.time(),
            **process_identity(),
        )

    def end(self, ending: Ending, detail: str, *, step: int | None) -> None:
        """Of several the last counts: a command says why it ends before it stops its children,
        which may take long and be killed, and again behind that."""
        self._append(ending=ending, detail=detail, at_step=step, at=time.time())

    def withdraw(self) -> None:
        """Of a run that was refused before it began: the file is as it was."""
        with contextlib.suppress(OSError):
            if self._before is None:
                self._path.unlink()
            else:
                os.truncate(self._path, self._before)

    def _append(self, **fields: object) -> None:
        with contextlib.suppress(OSError):
            private_folder(self._path.parent)
            with open_private(self._path, "a+b") as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read() != b"\n":  # a disk was full in the middle of a line
                        file.write(b"\n")
                file.write(json.dumps({"run": self._run, **fields}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())


class RecordedRuns(NamedTuple):
    """The last runs in a folder, the newest last. `damaged`: lines that are not whole, or not ours;
    they are passed over."""

    runs: list[RunRecord]
    damaged: int


def read_runs(state_dir: Path) -> RecordedRuns:
    starts: dict[str, Json] = {}
    ends: dict[str, Json] = {}
    damaged = 0
    try:
        with _path(state_dir).open("rb") as file:
            lines = _last_lines(file)
    except OSError:
        return RecordedRuns([], 0)
    for line in lines:
        try:
            read = json.loads(line)
            (starts if "command" in read else ends)[read.pop("run")] = read
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += 1
    found = []
    for run, start in starts.items():
        try:
            began = _start(start)
        except (ValueError, KeyError, TypeError, OverflowError):
            damaged += 1
            continue
        try:
            found.append(_ended(began, ends[run]) if run in ends else began)
        except (ValueError, KeyError, TypeError):
            found.append(began)  # an end that cannot be read is as good as none
            damaged += 1
    return RecordedRuns(found, damaged)


def _start(start: Json) -> RunRecord:
    return RunRecord(
        command=str(start["command"]),
        started_at=float(start["at"]),
        from_step=int(start.get("from_step", 0)),
        from_version=int(start.get("from_version", 0)),
        alive=process_is_alive(start),
    )


def _ended(began: RunRecord, end: Json) -> RunRecord:
    ended_at = float(end["at"])
    fields = {name: end.get(name) for name in ("ending", "detail", "at_step")}
    return RunRecord(**{**asdict(began), **fields, "ended_at": ended_at})


def _last_lines(file: IO[bytes]) -> list[bytes]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    lines = file.read().splitlines()
    return lines[1:] if size > _TAIL else lines  # the first may be cut


def _path(state_dir: Path) -> Path:
    return state_dir / "run" / "journal.jsonl"

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
from typing import IO, Literal

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


def read_runs(state_dir: Path) -> list[RunRecord]:
    """The last runs in the folder, the newest last; a line that is not whole, or not one of
    ours, is passed over."""
    starts: dict[str, Json] = {}
    ends: dict[str, Json] = {}
    try:
        with _path(state_dir).open("rb") as file:
            lines = _last_lines(file)
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(line)
            (starts if "command" in found else ends)[found.pop("run")] = found
    found = []
    for run, start in starts.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            found.append(_record(start, ends.get(run)))
    return found


def _record(start: Json, end: Json | None) -> RunRecord:
    began = RunRecord(
        command=str(start["command"]),
        started_at=float(start["at"]),
        from_step=int(start.get("from_step", 0)),
        from_version=int(start.get("from_version", 0)),
        alive=process_is_alive(start),
    )
    if end is None:
        return began
    try:
        ended_at = float(end["at"])
    except (ValueError, KeyError, TypeError):
        return began  # an end that cannot be read is as good as none
    fields = {name: end.get(name) for name in ("ending", "detail", "at_step")}
    return RunRecord(**{**asdict(began), **fields, "ended_at": ended_at})


def _last_lines(file: IO[bytes]) -> list[bytes]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    lines = file.read().splitlines()
    return lines[1:] if size > _TAIL else lines  # the first may be cut


def _path(state_dir: Path) -> Path:
    return state_dir / "run" / "journal.jsonl"

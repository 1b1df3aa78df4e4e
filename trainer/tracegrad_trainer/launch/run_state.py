"""What `trainer serve` is doing right now, for `trainer status`: one small file a process.

The store holds what happened; these files hold what is going on. Each is replaced whole, so a
reader never sees half of one, and it names the pid that wrote it, so a reader knows whether
the process is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from tracegrad.events import Json, new_id
from tracegrad.private_files import private_file, private_folder

# The stage of ranks that ended to go on from a version that was returned to.
ROLLED_BACK = "rolled back"
# A worker that has said nothing for so long hangs, or is gone.
SILENT_S = 30.0


class RunState:
    """`<state_dir>/run/<name>.json`, written by one process."""

    def __init__(self, state_dir: Path, name: str) -> None:
        self.path = state_dir / "run" / f"{name}.json"
        private_folder(self.path.parent)
        self._fields: Json = {**process_identity(), "started_at": time.time()}

    def update(self, **fields: object) -> None:
        """Adds `fields` to those written before, the time, and since when `stage` is what it is.

        A full disk costs this note, not the run: who trains or stops must not fail over this.
        """
        now = time.time()
        if fields.get("stage", self._fields.get("stage")) != self._fields.get("stage"):
            self._fields["stage_since"] = now
        self._fields |= fields
        self._fields["updated_at"] = now
        new = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):
            private_file(new)
            new.write_text(json.dumps(self._fields))
            new.replace(self.path)


def run_id(state_dir: Path) -> str:
    """The id of the run whose state the folder holds, made at the first call. Steps keep it.

    A copy of the folder is the same run; which of them goes on, the ledger decides.
    """
    path = state_dir / "run" / "id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"id.{os.getpid()}.new")
        new.write_text(new_id())
        with contextlib.suppress(FileExistsError):
            os.link(new, path)  # whoever is first
        new.unlink()
    return path.read_text().strip()


def read_state(state_dir: Path, name: str) -> Json | None:
    """The last state written, with `alive` added; None if there never was one."""
    try:
        state: Json = json.loads((state_dir / "run" / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return {**state, "alive": process_is_alive(state)}


def is_at_work(
    state_dir: Path, name: str, pid: int | None = None, *, clock: Callable[[], float] = time.time
) -> bool:
    """Whether the worker of that name has said so a short while ago; `pid`: whether that process
    has. It may be another machine's, where the folder is shared."""
    said = read_state(state_dir, name)
    if said is None or pid not in (None, said["pid"]):
        return False
    return bool(clock() - said.get("updated_at", 0.0) < SILENT_S)


def delete_state(state_dir: Path, name: str) -> bytes | None:
    """Removes the state of a process that has ended -> what it was, for `restore_state`."""
    path = state_dir / "run" / f"{name}.json"
    before = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    return before


def restore_state(state_dir: Path, name: str, before: bytes | None) -> None:
    """As it was before `delete_state`. A full disk costs this note alone."""
    path = state_dir / "run" / f"{name}.json"
    with contextlib.suppress(OSError):
        if before is None:
            path.unlink(missing_ok=True)
            return
        new = path.with_suffix(".new")
        private_file(new)
        new.write_bytes(before)
        new.replace(path)


def process_identity() -> Json:
    """This process: its pid alone may be another's later, after a reboot for one."""
    pid = os.getpid()
    return {"pid": pid, "process_start": _start_ticks(pid)}


def process_is_alive(identity: Json) -> bool:
    """Whether the process of a `process_identity` runs; notes of earlier versions have its pid."""
    pid: int = identity["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    ticks, then = _start_ticks(pid), identity.get("process_start")
    return ticks != 0 and (ticks is None or then is None or ticks == then)


def _start_ticks(pid: int) -> int | None:
    """When it started, in ticks since the boot; 0: it has ended, and its parent has not asked how;
    None: the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # a program's name may hold spaces and brackets
    return 0 if fields[0] in "ZX" else int(fields[19])

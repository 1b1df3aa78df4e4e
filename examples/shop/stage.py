"""`trainer serve` as the demo's and the controls' child: started, waited for, asked, stopped."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracegrad.store import Ledger, StepRecord, Store, TurnCounts
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

TRAINED_SPLIT = "train"
NOTICED_S = 5.0  # by then `trainer serve` knows that a part of it has died,
STOPPED_S = 60.0  # and then it needs at most so long to stop the others


@dataclass(frozen=True)
class Stage:
    """A running stack: the proxy's URL, and the store to ask what happened."""

    url: str
    state_dir: Path
    store: Store
    child: ChildProcess

    @property
    def version(self) -> int:
        return self.store.current_version() or 0

    @property
    def last_step(self) -> int:
        step = Ledger(self.store).last_step()
        return step.step if step else 0

    def steps(self) -> list[StepRecord]:
        return Ledger(self.store).steps()

    def turn_counts(self) -> TurnCounts:
        return self.store.turn_counts({"split": TRAINED_SPLIT})

    def doing(self) -> str:
        """What the trainer's ranks do right now."""
        return str((read_state(self.state_dir, "ranks") or {}).get("stage", "starting"))

    def check(self) -> None:
        """Raises ChildError, one line, if the stack is gone."""
        _check(self.child)

    def explain(self) -> None:
        """A call failed: if the stack is ending, waits for its last words and raises ChildError."""
        started, patience = time.monotonic(), NOTICED_S
        while time.monotonic() - started < patience:
            self.check()
            if (read_state(self.state_dir, "serve") or {}).get("stage") == "stopping":
                patience = STOPPED_S
            time.sleep(0.1)


@contextmanager
def served(
    port: int,
    model: Path,
    state_dir: Path,
    overrides: Mapping[str, object],
    tick: Callable[[str], None],
) -> Iterator[Stage]:
    """`trainer serve` with its proxy at `port`, ready to be called.

    `overrides` are settings (`table.name` -> value). `tick(what)` is called several times a
    second until the stack is up. Raises ChildError.
    """
    settings = {
        "model": model,
        "state_dir": state_dir,
        "proxy.port": port,
        **overrides,
    }
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "tracegrad_trainer", "serve", *sets]
    log = state_dir / "logs" / "serve.log"
    child = ChildProcess("trainer serve", command, log=log, env=os.environ)  # its settings too
    child.log.unlink(missing_ok=True)
    child.start()
    store: Store | None = None
    try:
        while not _is_serving(state_dir, child):
            _check(child)
            tick(_last_line(child.log))
            time.sleep(0.1)
        store = Store.open(f"sqlite:///{state_dir}/store.db", create=False)
        yield Stage(f"http://127.0.0.1:{port}", state_dir, store, child)
    finally:
        if store is not None:
            store.close()
        child.stop(grace_s=45)


def _check(child: ChildProcess) -> None:
    """`trainer serve` says in its own last line why it ended: that line is the error."""
    if child.exit_code() is not None and (line := _last_line(child.log)):
        raise ChildError(line if "(log: " in line else f"{line} (log: {child.log})")
    child.check()


def _is_serving(state_dir: Path, child: ChildProcess) -> bool:
    state = read_state(state_dir, "serve") or {}
    return state.get("pid") == child.pid and state.get("stage") == "serving"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")

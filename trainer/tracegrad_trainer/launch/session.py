"""What the commands that start ranks share: the folder, the store, and how they are stopped.

Nothing here needs torch: a command that waits for its ranks need not import it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from tracegrad.log_format import write_json_log
from tracegrad.private_files import private_file
from tracegrad.proxy.config import SecretUrl
from tracegrad.store import StepHistory, StepRecord, Store, StoreUnavailable
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.folder_lock import (
    FolderLockedError,
    lock_for_command,
    lock_for_workers,
)
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.utils.subprocesses import ChildProcess

RANKS_GRACE_S = 30.0
POLL_S = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout`, and a terminal behind `make`, send one signal twice: that is one wish.
SAME_SIGNAL_S = 0.5
_AGAIN_S = 0.05

# Of a command that had nothing to do: no success, and no failure either.
NOTHING = 3


class StopRequested(BaseException):
    """SIGTERM or SIGINT, by its name: not an error, and nothing on the way may swallow it."""


class StartError(RuntimeError):
    """Why nothing was started, in one line."""


class RefusedError(StartError):
    """By rank 0, before the run began: the folder is to be as it was."""


def log_as_supervisor(settings: TrainerSettings) -> None:
    """What this process logs is written as its children write theirs. Lines for people stay."""
    if settings.log_format == "json":
        write_json_log("supervisor")


@contextmanager
def raising_on_stop_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise StopRequested, until the stack begins to stop."""
    last: list[int] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        last[:] = [number]
        raise StopRequested("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    def swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        """Raised within a finalizer, as those of database connections, it would be printed and
        forgotten: the signal comes again, when that has ended."""
        if isinstance(unraisable.exc_value, StopRequested):
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), *last)).start()
        else:
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        sys.unraisablehook = hook


def on_second_signal(stop_at_once: Callable[[], None]) -> None:
    """From now on a stop signal is a second one: whoever sent it does not want to wait."""
    since = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - since >= SAME_SIGNAL_S:
            stop_at_once()

    for each in STOP_SIGNALS:
        signal.signal(each, stop)


def write_resolved_settings(settings: TrainerSettings, name: str = "settings.json") -> Path:
    """The resolved settings as the ranks read them, less what is secret (see `RankProcesses`).

    Later commands take the commit of a model of the Hub from `settings.json`: where the ranks may
    still refuse the settings, they read them under another `name`.
    """
    path = settings.state_dir / "run" / name
    private_file(path)
    path.write_text(settings.model_dump_json(indent=2))
    return path


def open_store(url: SecretUrl) -> Store:
    """Raises StartError, StoreError."""
    try:
        return Store.open(url)
    except ValueError as error:
        raise StartError(f"proxy.{error}") from None


def stop_ranks(ranks: ChildProcess, settings: TrainerSettings, say: Callable[[str], None]) -> None:
    """They end the step under way and write the checkpoint of the steps that none has, for which
    they have `checkpoint.stop_timeout_s`; `say` hears of it."""
    state = read_state(settings.state_dir, "ranks") or {}
    pending: list[int] = state.get("pending", [])
    grace_s = RANKS_GRACE_S
    if ranks.exit_code() is None and (pending or state.get("stage") == "training"):
        grace_s = max(grace_s, settings.checkpoint.stop_timeout_s)
        what = "the step under way ends"
        if len(pending) > 1:
            what = f"steps {pending[0]} to {pending[-1]} get their checkpoint"
        say(f"stopping: {what} first (at most {grace_s:.0f} s)")
    # Rank 0 tells the others. torch's launcher would kill them all half a minute after a signal.
    if state.get("alive"):
        ranks.stop_by(state["pid"], grace_s=grace_s)
    else:
        ranks.stop(grace_s=grace_s)


def committed_point(store: Store) -> tuple[int, int]:
    """Step and version of the last committed step; 0, 0: there is none."""
    last = StepHistory(store).steps(limit=1)
    return (last[0].step, last[0].version) if last else (0, 0)


def max_steps_reached(settings: TrainerSettings, step: int) -> str | None:
    """What to say where `step` is the last that is wanted; None: more are."""
    limit = settings.max_steps
    if limit is None or step < limit:
        return None
    return f"max_steps = {limit} is reached; to go on, set it higher (--set max_steps={2 * limit})"


def lock_state_folder(state_dir: Path, *, beside_ranks: bool = False) -> IO[bytes]:
    """The folder is ours while the file that this returns is open; `beside_ranks`: but for ranks
    of another launcher. Raises StartError."""
    try:
        return lock_for_workers(state_dir) if beside_ranks else lock_for_command(state_dir)
    except FolderLockedError as error:
        raise StartError(str(error)) from None
    except OSError as error:
        raise StartError(
            f"state_dir: {state_dir} cannot be written: {error.strerror}; take another folder"
            " (--state-dir ...)"
        ) from None


def check_output_dir(out: Path, models: Iterable[Path]) -> None:
    """Whether a model may be written to a folder: all that is there is replaced, but never one of
    `models`, which training begins with.

    Raises:
        ValueError: the folder holds something else than an earlier model, or one of `models`.
    """
    if any(out.resolve() == model.resolve() for model in models):
        raise ValueError(f"--out {out}: training begins with the model in it; name another folder")
    if out.exists() and not _is_a_model(out) and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: it holds something else; name a new folder")


def _is_a_model(folder: Path) -> bool:
    configs = ("config.json", "adapter_config.json")
    return any((folder / one).is_file() for one in configs) and any(folder.glob("*.safetensors"))


class StepFeed:
    """Each step that is committed from now on, once."""

    def __init__(self, store: Store) -> None:
        self._history = StepHistory(store)
        last = self._history.steps(limit=1)
        self._last = last[0].step if last else 0

    def new_steps(self) -> list[StepRecord]:
        """Those that were committed since the last call, in order."""
        found = self._history.after(self._last)
        if found:
            self._last = found[-1].step
        return found

    def show_until_end(
        self,
        ranks: ChildProcess,
        show: Callable[[StepRecord], None],
        check: Callable[[], None],
        *,
        starts_again: Callable[[], bool] = lambda: False,
    ) -> None:
        """Shows each step, until the ranks are done or `check` raises: a part has died. Those in a
        store that is away for a while are shown later. Ranks that ended well and that `check`
        `starts_again` are not done."""
        while True:
            finished = ranks.exit_code() == 0 and not starts_again()
            try:
                for step in self.new_steps():
                    show(step)
            except StoreUnavailable:
                if finished:
                    raise
            if finished:
                return
            # Ranks that ended well meanwhile are no fault, and have steps that nobody was shown.
            if ranks.exit_code() != 0 or starts_again():
                check()
                time.sleep(POLL_S)

"""`trainer step`: starts the ranks on what the store holds, and reports their steps.

The checks before the first step are rank 0's, which has torch at hand: here it is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tracegrad.store import Ledger, StepRecord, Store, StoreError
from tracegrad_trainer.cli.notices import PatternNotice
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.cli.score import describe_totals, scoring_scope
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_journal import RunJournal
from tracegrad_trainer.launch.run_state import delete_state, read_state, restore_state
from tracegrad_trainer.launch.session import (
    NOTHING,
    RefusedError,
    StartError,
    StepFeed,
    StopRequested,
    committed_point,
    lock_state_folder,
    log_as_supervisor,
    on_second_signal,
    open_store,
    raising_on_stop_signals,
    stop_ranks,
    write_resolved_settings,
)
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.rewards.scoring import score_now
from tracegrad_trainer.rl.idle_rollouts import IdleRollouts
from tracegrad_trainer.utils.console import print_error, print_json
from tracegrad_trainer.utils.subprocesses import ChildError

FAILED = 1
UNCHECKED = "settings.unchecked.json"


def step(settings: TrainerSettings, steps: int, console: Console, *, as_json: bool = False) -> int:
    """Takes `steps` optimizer steps, or as many as there is something for -> exit code."""

    def show(record: StepRecord) -> None:
        if as_json:
            line = {"step": record.step, "version": record.version, "metrics": record.metrics}
            print_json(line | {"checkpoint": record.checkpoint})
        else:
            console.print(format_step_line(record), highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        if not as_json:
            console.print(line, highlight=False, soft_wrap=True)

    log_as_supervisor(settings)
    try:
        with raising_on_stop_signals():
            said, taken = _run(settings, steps, show, say)
    except StopRequested as stop:
        said, taken = f"stopped by {stop}; steps that were made are in the store", 1
    except (StartError, ChildError, StoreError, OSError) as error:
        print_error(f"trainer step: {error}", console)
        return FAILED
    say(said)
    return 0 if taken else NOTHING


def _run(
    settings: TrainerSettings,
    steps: int,
    show: Callable[[StepRecord], None],
    say: Callable[[str], None],
) -> tuple[str, int]:
    """How it ended, and how many steps were taken. Raises StartError, ChildError."""
    with (
        lock_state_folder(settings.state_dir),
        open_store(settings.proxy.store) as store,
        _journalled(settings, store) as journal,
        _unchecked_settings(settings) as unchecked,
    ):
        if settings.rewards.composes:
            say(_scored(settings, store))
        before = delete_state(settings.state_dir, "ranks")
        ranks = RankProcesses(
            settings,
            unchecked,
            program="tracegrad_trainer.rl.offline_worker",
            arguments=["--steps", str(steps)],
        )
        ranks.log.unlink(missing_ok=True)
        try:
            _watch(ranks, settings, store, show, say)
        except RefusedError:
            restore_state(settings.state_dir, "ranks", before)
            raise
        state = read_state(settings.state_dir, "ranks") or {}
        said = str(state.get("said", ""))
        journal.end(state.get("ending", "done"), said, step=committed_point(store)[0])
    return said, int(state.get("taken", 0))


def _scored(settings: TrainerSettings, store: Store) -> str:
    """All that ended, before the ranks look for rewards. Raises StartError."""
    if settings.data.idle_s is not None:
        IdleRollouts(Ledger(store), settings.data.idle_s, settings.data.tags).close_all()
    try:
        return describe_totals(score_now(store, settings.rewards, scoring_scope(settings)))
    except ValueError as error:
        raise StartError(str(error)) from None


@contextmanager
def _unchecked_settings(settings: TrainerSettings) -> Iterator[Path]:
    """The file that the ranks read: rank 0 may refuse what is in it."""
    path = write_resolved_settings(settings, UNCHECKED)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _journalled(settings: TrainerSettings, store: Store) -> Iterator[RunJournal]:
    """Its end is written, whatever it is that ends it; nothing, where it did not begin."""
    step, version = committed_point(store)
    journal = RunJournal(settings.state_dir, "trainer step", step=step, version=version)
    try:
        yield journal
    except StopRequested as stop:
        journal.end("signal", f"stopped by {stop}", step=committed_point(store)[0])
        raise
    except RefusedError:
        journal.withdraw()
        raise
    except BaseException as error:
        journal.end("error", str(error) or type(error).__name__, step=None)
        raise


def _watch(
    ranks: RankProcesses,
    settings: TrainerSettings,
    store: Store,
    show: Callable[[StepRecord], None],
    say: Callable[[str], None],
) -> None:
    """Says with what they begin, shows their steps, until they end. Raises StartError, and
    RefusedError where they did not begin."""
    begun = False

    def begins() -> None:
        nonlocal begun
        line = None if begun else (read_state(settings.state_dir, "ranks") or {}).get("begins")
        if line is not None:
            begun = True
            write_resolved_settings(settings)  # rank 0 has checked them
            say(line)

    def show_next(record: StepRecord) -> None:
        begins()
        show(record)

    patterns = PatternNotice(settings.state_dir, say)

    def check() -> None:
        begins()
        patterns.tick()
        ranks.check()

    ranks.start()
    try:
        StepFeed(store).show_until_end(ranks, show_next, check)
        begins()
        patterns.tick()
    except ChildError as error:
        said = (read_state(settings.state_dir, "ranks") or {}).get("error")  # by rank 0
        refused = said is not None and not begun
        raise (RefusedError if refused else StartError)(str(said or error)) from None
    finally:
        on_second_signal(ranks.kill)
        stop_ranks(ranks, settings, say)

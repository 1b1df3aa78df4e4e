"""Ranks of `trainer serve` that a launcher of the user's starts: what the command does otherwise.

`torchrun` knows nothing of steps and versions. So rank 0 checks beforehand what the command would
have checked, and writes down for `trainer status` and its like what the command would have written.
Workers it does not start: `trainer workers` does, and rank 0 says so where nobody has.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracegrad.store import Store, StoreLost
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_journal import Ending, RunJournal
from tracegrad_trainer.launch.run_state import ROLLED_BACK, read_state
from tracegrad_trainer.launch.session import (
    committed_point,
    max_steps_reached,
    write_resolved_settings,
)
from tracegrad_trainer.launch.workers import absent_workers
from tracegrad_trainer.rl.preflight import check_before_training

logger = logging.getLogger(__name__)

# As `trainer status` has it.
COMMAND = "torchrun"
# To be started again: torch's launcher does that with every code but 0, `--max-restarts` times.
START_AGAIN = os.EX_TEMPFAIL


def is_own_launcher(settings: TrainerSettings, settings_file: Path) -> bool:
    """Whether no command of ours started the ranks: it hands them the settings as it resolved
    them."""
    return settings_file.resolve() != settings.state_dir / "run" / "settings.json"


def exit_code(*, starts_again: bool) -> int:
    """Of ranks that ended well. `starts_again`: they are to go on from a version that was returned
    to, and whoever started them is to start them again."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return START_AGAIN if starts_again and restarts > 0 else 0


def check_start(settings: TrainerSettings) -> None:
    """Rank 0, before anything is loaded. A store that does not answer yet is waited for later.

    Raises:
        ValueError, CheckpointError, StoreError: what is wrong.
    """
    try:
        with Store.open(settings.proxy.store) as store:
            check_before_training(settings, store)
    except StoreLost:
        return


def warn_of_absent_workers(settings: TrainerSettings, settings_file: Path) -> None:
    """Rank 0: which of the workers that the settings need nobody has started. What only they do
    would be waited for for ever."""
    absent = absent_workers(settings)
    if absent:
        logger.warning(
            "%s: these settings need them, and nobody has started them: start them beside the"
            " ranks: trainer workers --config %s --state-dir %s",
            *(" and ".join(absent), settings_file.resolve(), settings.state_dir),
        )


@contextmanager
def journal(settings: TrainerSettings, store: Store) -> Iterator[None]:
    """Rank 0: the run's settings, its beginning and its end, as `trainer serve` notes them."""
    write_resolved_settings(settings)
    step, version = committed_point(store)
    written = RunJournal(settings.state_dir, COMMAND, step=step, version=version)
    ending: Ending = "error"
    said = "ended early"
    try:
        yield
        step, _ = committed_point(store)
        state = read_state(settings.state_dir, "ranks") or {}
        ending, said = "signal", "asked to end"
        if state.get("stage") == ROLLED_BACK:
            said = "ended to go on from a version that was returned to"
        elif reached := max_steps_reached(settings, step):
            ending, said = "max_steps", reached
    except BaseException as error:
        said = str(error) or type(error).__name__
        raise
    finally:
        written.end(ending, said, step=step)

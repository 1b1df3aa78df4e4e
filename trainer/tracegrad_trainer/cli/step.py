"""`trainer step`: starts the ranks on what the store holds, and reports their steps.

The checks before the first step are rank 0's, which has torch at hand: here it is not imported.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from tracegrad.store import StepRecord, StoreError
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_state import delete_state, read_state
from tracegrad_trainer.launch.session import (
    RANKS_GRACE_S,
    StartError,
    StepFeed,
    StopRequested,
    lock_state_folder,
    open_store,
    raising_on_stop_signals,
    write_resolved_settings,
)
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.utils.console import print_error, print_json
from tracegrad_trainer.utils.subprocesses import ChildError

FAILED = 1
NOTHING = 3  # nothing to train


def step(settings: TrainerSettings, steps: int, console: Console, *, as_json: bool = False) -> int:
    """Takes `steps` optimizer steps, or as many as there is something for -> exit code."""

    def show(record: StepRecord) -> None:
        if as_json:
            line = {"step": record.step, "version": record.version, "metrics": record.metrics}
            print_json(line | {"checkpoint": record.checkpoint})
        else:
            console.print(format_step_line(record), highlight=False, soft_wrap=True)

    try:
        with raising_on_stop_signals():
            said, taken = _run(settings, steps, show)
    except StopRequested:
        said, taken = "stopped; steps that were made are in the store", 1
    except (StartError, ChildError, StoreError, OSError) as error:
        print_error(f"trainer step: {error}", console)
        return FAILED
    if not as_json:
        console.print(said, highlight=False, soft_wrap=True)
    return 0 if taken else NOTHING


def _run(
    settings: TrainerSettings, steps: int, show: Callable[[StepRecord], None]
) -> tuple[str, int]:
    """How it ended, and how many steps were taken. Raises StartError, ChildError."""
    with lock_state_folder(settings.state_dir), open_store(settings.proxy.store) as store:
        delete_state(settings.state_dir, "ranks")
        ranks = RankProcesses(
            settings,
            write_resolved_settings(settings),
            program="tracegrad_trainer.rl.offline_worker",
            arguments=["--steps", str(steps)],
        )
        ranks.log.unlink(missing_ok=True)
        ranks.start()
        try:
            StepFeed(store).show_until_end(ranks, show, ranks.check)
        except ChildError as error:
            said = (read_state(settings.state_dir, "ranks") or {}).get("error")  # by rank 0
            raise StartError(str(said or error)) from None
        finally:
            ranks.stop(grace_s=RANKS_GRACE_S)
    state = read_state(settings.state_dir, "ranks") or {}
    return str(state.get("said", "")), int(state.get("taken", 0))

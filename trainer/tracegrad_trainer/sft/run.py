"""`trainer sft` as a command: starts the ranks, and prints their progress."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from tracegrad.events import Json
from tracegrad.private_files import private_file, private_folder
from tracegrad.store import StoreError
from tracegrad_trainer.launch.session import (
    RANKS_GRACE_S,
    StartError,
    StopRequested,
    lock_state_folder,
    log_as_supervisor,
    raising_on_stop_signals,
)
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.sft.config import SftSettings
from tracegrad_trainer.sft.report import data_counts, format_record
from tracegrad_trainer.utils.console import print_error, print_json
from tracegrad_trainer.utils.subprocesses import ChildError

POLL_S = 0.2
FAILED = 1


def run_sft(settings: SftSettings, console: Console, *, as_json: bool = False) -> int:
    """Runs to the end -> exit code. With `as_json` each record is a line on standard output."""
    log_as_supervisor(settings.trainer)
    try:
        with raising_on_stop_signals(), lock_state_folder(settings.run_folder):
            return _run(settings, console, as_json=as_json)
    except StopRequested:
        console.print("stopped; the same command goes on from the last checkpoint")
        return FAILED
    except (StartError, ChildError, OSError) as error:
        print_error(f"trainer sft: {error}", console)
        return FAILED


def show_dry_run(settings: SftSettings, console: Console, *, as_json: bool = False) -> int:
    """What would be learnt, measured and left out; nothing is started."""
    from tracegrad_trainer.sft.train import prepare_data

    try:
        counts = data_counts(prepare_data(settings))
    except (StoreError, ValueError) as error:
        print_error(f"trainer sft: {error}", console)
        return FAILED
    _show({"event": "data", **counts}, console, as_json=as_json)
    return 0


def _run(settings: SftSettings, console: Console, *, as_json: bool) -> int:
    private_folder(settings.progress_file.parent)
    private_file(settings.progress_file)
    settings.progress_file.write_text("")
    run = settings.trainer.state_dir / "run"
    unchecked = run / "sft.unchecked.json"  # the ranks may refuse what is in it
    private_file(unchecked)
    # Less what is secret: see `RankProcesses`.
    unchecked.write_text(settings.model_dump_json(indent=2))
    ranks = RankProcesses(settings.trainer, unchecked, program="tracegrad_trainer.sft.train")
    ranks.log = settings.trainer.logs / "sft.log"
    failed = False
    try:
        ranks.start()
        for record in _records(ranks, settings.progress_file):
            failed = failed or record["event"] == "failed"
            # By the first of these every rank has its model.
            if record["event"] not in ("data", "failed") and unchecked.exists():
                unchecked.replace(run / "sft.json")
            _show(record, console, as_json=as_json)
        if not failed and ranks.exit_code() != 0:
            ranks.check()
    finally:
        ranks.stop(grace_s=RANKS_GRACE_S)
        unchecked.unlink(missing_ok=True)
    return FAILED if failed else 0


def _records(ranks: RankProcesses, progress_file: Path) -> Iterator[Json]:
    """What the run reports, until the ranks have ended, well or not."""
    part = ""  # of a line that is being written
    with progress_file.open() as file:
        while True:
            ended = ranks.exit_code() is not None
            for line in file:
                part += line
                if part.endswith("\n"):
                    yield json.loads(part)
                    part = ""
            if ended:
                return
            time.sleep(POLL_S)


def _show(record: Json, console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        console.print(format_record(record), markup=False, highlight=False, soft_wrap=True)

"""One rank as a process: what the programs that torch.distributed's launcher starts share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import torch

from tracegrad.log_format import write_last_words
from tracegrad.private_files import set_private_umask
from tracegrad.store import StoreError
from tracegrad_trainer.config.loading import load_settings, parse_resolved
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.inference.control_routes import PushError
from tracegrad_trainer.launch.folder_lock import lock_for_ranks
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.utils.distributed import RankZeroError, configure_logging, launch_rank
from tracegrad_trainer.utils.subprocesses import die_with_parent

_MORE_ROOM = (
    "try fsdp.gradient_checkpointing = true, a smaller batches.tokens_per_micro_batch, [fsdp.lora],"
    " fsdp.cpu_offload = true, or more GPUs"
)
# What ends a rank with one line; anything else is a defect and ends with its traceback.
_EXPECTED = (
    RankZeroError,
    torch.OutOfMemoryError,
    CheckpointError,
    PushError,
    StoreError,
    ValueError,
    OSError,
)


class StopFlag:
    """Whether the process was asked to stop (SIGTERM)."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> bool:
        return self.is_set

    def listen(self) -> None:
        def stop(number: int, frame: FrameType | None) -> None:
            self.is_set = True

        signal.signal(signal.SIGTERM, stop)


def search_working_folder() -> None:
    """Parts of one's own (`package.module:function`) lie in the working directory: it is searched
    behind all else, so that no file there hides a library."""
    sys.path.append(str(Path.cwd()))


RankProgram = Callable[[TrainerSettings, ExitStack, StopFlag], None]


def run_rank(settings_file: str, program: RankProgram) -> int:
    """The exit code; where it fails, one line and the run's state say why.

    `settings_file` is JSON as resolved settings are written, or TOML.
    """
    search_working_folder()
    settings: TrainerSettings | None = None

    def work(stack: ExitStack, stop: StopFlag) -> None:
        nonlocal settings
        read = read_settings(Path(settings_file))
        configure_logging(read.log_format)  # a torchrun of one's own has no variable for it
        if launch_rank() == 0:
            stack.enter_context(lock_for_ranks(read.state_dir))
        settings = read  # from here on the run's state is ours to write
        program(settings, stack, stop)

    def failed(line: str) -> None:
        if settings is not None:
            RunState(settings.state_dir, "ranks").update(stage="failed", error=line)

    return run_as_rank(work, failed=failed)


def run_as_rank(
    work: Callable[[ExitStack, StopFlag], None], *, failed: Callable[[str], None]
) -> int:
    """The exit code of a rank that does `work`; rank 0 calls `failed` with what went wrong."""
    set_private_umask()  # a torchrun of one's own has the shell's umask
    # The launcher may be killed; a rank that waits in a collective would notice neither that nor
    # a SIGTERM, whose handler Python runs only when the collective is over.
    die_with_parent(signal.SIGKILL)
    configure_logging()
    stop = StopFlag()
    said = False

    def say(error: Exception) -> None:
        nonlocal said
        if not said and (line := _last_words(error)):
            said = True
            # As a traceback ends: `utils.subprocesses` finds it in the log.
            write_last_words(f"{type(error).__name__}: {line}")
            if launch_rank() == 0:
                failed(line)

    try:
        with ExitStack() as stack:
            stop.listen()
            try:
                work(stack, stop)
            except _EXPECTED as error:
                # Before the process group is left: a peer dies of that, and the launcher may then
                # end this rank before it has said why.
                say(error)
                raise
    except _EXPECTED as error:
        say(error)  # of what the stack closes
        return 1
    return 0


def _last_words(error: Exception) -> str:
    """Empty where another rank says it."""
    if isinstance(error, RankZeroError):
        return ""
    if isinstance(error, torch.OutOfMemoryError):
        # What failed, how much was asked for, and how much there is and was free.
        figures = ". ".join(str(error).split(". ")[:3]).rstrip(".")
        return f"{figures}; {_MORE_ROOM}"
    return str(error)


def read_settings(path: Path) -> TrainerSettings:
    """Raises ValueError, OSError."""
    if path.suffix == ".toml":
        return load_settings(path)
    return parse_resolved(path.read_text(encoding="utf-8"))

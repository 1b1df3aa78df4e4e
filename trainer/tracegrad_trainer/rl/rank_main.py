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
from tracegrad_trainer.config.trainer import TrainerSettings, load_settings, parse_resolved
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
    try:
        with ExitStack() as stack:
            stop.listen()
            work(stack, stop)
    except RankZeroError:
        return 1  # rank 0 says why
    except torch.OutOfMemoryError as error:
        return _end(f"{str(error).split('.')[0]}; {_MORE_ROOM}", "OutOfMemoryError", failed)
    except (CheckpointError, PushError, StoreError, ValueError, OSError) as error:
        return _end(str(error), type(error).__name__, failed)
    return 0


def _end(line: str, kind: str, failed: Callable[[str], None]) -> int:
    # As a traceback ends: `utils.subprocesses` finds it in the log.
    write_last_words(f"{kind}: {line}")
    if launch_rank() == 0:
        failed(line)
    return 1


def read_settings(path: Path) -> TrainerSettings:
    """Raises ValueError, OSError."""
    if path.suffix == ".toml":
        return load_settings(path)
    return parse_resolved(path.read_text(encoding="utf-8"))

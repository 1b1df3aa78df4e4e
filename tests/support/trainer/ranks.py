"""A function of the tests on several ranks, forked from one process that imported torch once.

torch and transformers take ten seconds of CPU to import, so ranks are not started by torchrun: a
fork server imports them for all jobs of a session. Each job gets processes, and a process group,
of its own; the environment is that of torchrun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.system.module_environment import environment
from tracegrad_trainer.utils.network import find_free_port

_PRELOADED = (
    "support.trainer.layout_ranks",
    "support.trainer.lora_ranks",
    "support.trainer.load_ranks",
    "support.trainer.context_ranks",
)
_TIMEOUT_S = 240
_LAST_WORDS_S = 5  # for the other ranks, once one has failed


@cache
def _server() -> ForkServerContext:
    from multiprocessing.forkserver import ensure_running

    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    before = dict(os.environ)
    # It is started with our environment, and torch reads the number of threads when imported.
    os.environ.update(environment(), OMP_NUM_THREADS="1")
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def run_on_ranks(job: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """`job(*arguments)` on every rank, `job` a module's own function; returns once all are done.

    Raises:
        RuntimeError: a rank failed, with what it wrote; the others are ended.
    """
    port = find_free_port()
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}" for rank in range(ranks)]
        started = [
            _server().Process(target=_rank, args=(job, arguments, rank, ranks, port, str(log)))
            for rank, log in enumerate(logs)
        ]
        for process in started:
            process.start()
        deadline = time.monotonic() + _TIMEOUT_S
        while any(process.is_alive() for process in started):
            if any(process.exitcode for process in started):
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for process in started:
            process.kill()
            process.join()
        if any(process.exitcode for process in started):
            ends = [process.exitcode for process in started]
            said = "\n".join(log.read_text()[-4000:] for log in logs if log.exists())
            raise RuntimeError(f"{job.__module__} on {ranks} ranks ended with {ends}:\n{said}")


def run_program(main: Callable[[list[str]], int], arguments: Sequence[str]) -> tuple[int, str]:
    """A rank's program, alone, as torchrun starts it -> its exit code, and what it wrote."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "rank-0"
        asked = (_exit_with, (main, [*arguments]), 0, 1, find_free_port(), str(log))
        process = _server().Process(target=_rank, args=asked)
        process.start()
        process.join(_TIMEOUT_S)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return process.exitcode, log.read_text()


def _exit_with(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    sys.exit(main(arguments))


def _rank(
    job: Callable[..., None],
    arguments: tuple[Any, ...],
    rank: int,
    ranks: int,
    port: int,
    log: str,
) -> None:
    with open(log, "w") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, ranks, ranks)), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    job(*arguments)

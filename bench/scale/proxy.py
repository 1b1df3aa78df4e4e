"""`tracegrad proxy` under the virtual clock, with a look at its writer: `python -m
bench.scale.proxy BOARD ...`.

The application, the server and the store are those of the command; `Store.append`, which only the
writer's thread calls, is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bench.scale.board import Board, Cell
from bench.scale.clock import virtual_time

if TYPE_CHECKING:
    from tracegrad.events import Event
    from tracegrad.store import Store

Append = Callable[..., None]
_SCHEDULED = Path("/proc/thread-self/schedstat")


def timed(append: Append, board: Board) -> Append:
    """`Store.append`, counted: from the reading of parents until the commit is on the disk, without
    the time in which its thread was ready to run and others had the cores."""
    from tracegrad.events import Turn

    def timed_append(store: Store, events: Sequence[Event], **options: Any) -> None:
        wall, cpu, delay = time.perf_counter(), time.thread_time(), _run_delay_s()
        try:
            append(store, events, **options)
        finally:
            delay = _run_delay_s() - delay
            board.add(Cell.WRITER_S, time.perf_counter() - wall - delay)
            board.add(Cell.WRITER_CPU_S, time.thread_time() - cpu)
            board.add(Cell.WRITER_DELAY_S, delay)
        board.add(Cell.COMMITS, 1)
        board.add(Cell.EVENTS, len(events))
        board.add(Cell.TURNS, sum(isinstance(event, Turn) for event in events))

    return timed_append


def _run_delay_s() -> float:
    """Seconds that this thread has waited for a core so far: the second field, in nanoseconds."""
    return int(_SCHEDULED.read_bytes().split()[1]) / 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale.proxy", description=__doc__)
    parser.add_argument("board", type=Path)
    for name in ("upstream", "store", "tokenizer"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    board = Board(options.board)
    # Before anything of tracegrad is imported: its events keep the clock of their definition.
    with virtual_time(lambda: board[Cell.NOW]):
        from tracegrad.proxy.cli import serve
        from tracegrad.proxy.config import ProxySettings
        from tracegrad.store import Store

        settings: dict[str, Any] = {
            name: getattr(options, name) for name in ("upstream", "store", "tokenizer", "port")
        }
        with patch.object(Store, "append", timed(Store.append, board)):
            serve(ProxySettings(**settings))


if __name__ == "__main__":
    main()

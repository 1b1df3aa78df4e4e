"""Worker processes of `trainer serve`, neither vLLM, proxy nor rank: how one begins and ends.

Each is `python -m MODULE SETTINGS.json`, the resolved settings of the run; what is secret comes in
the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tracegrad.log_format import write_last_words, write_log
from tracegrad.private_files import set_private_umask
from tracegrad.store import StoreError
from tracegrad.transport import ProxyRefused
from tracegrad_trainer.utils.subprocesses import die_with_parent

# Of the resolved settings, until the event is set.
Work = Callable[[dict[str, Any], asyncio.Event], Awaitable[None]]


def run_worker(role: str, work: Work, arguments: Sequence[str] | None = None) -> int:
    """Until SIGTERM, SIGINT or the end of who started it. The exit code; where it fails, one line
    says why."""
    parser = argparse.ArgumentParser(prog=role)
    parser.add_argument("settings", help="a JSON file of resolved settings", type=Path)
    given = parser.parse_args(arguments)
    set_private_umask()
    die_with_parent(signal.SIGTERM)
    write_log(role, text="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(_until_stopped(work, json.loads(given.settings.read_text(encoding="utf-8"))))
    except (StoreError, ProxyRefused, ValueError, OSError) as error:
        # As a traceback ends: `utils.subprocesses` finds it in the log.
        write_last_words(f"{type(error).__name__}: {error}")
        return 1
    return 0


async def _until_stopped(work: Work, resolved: dict[str, Any]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await work(resolved, stop)

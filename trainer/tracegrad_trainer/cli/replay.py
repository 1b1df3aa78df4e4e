"""What `trainer replay` prints, and how it ends."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tracegrad.store import Store, StoreError
from tracegrad_trainer.replay.load import list_candidates
from tracegrad_trainer.replay.render import render_candidates, render_replay
from tracegrad_trainer.replay.replay import ReplayRequest, replay
from tracegrad_trainer.utils.console import no_progress_bars, print_json, print_report

EQUAL, DIFFERENT, BAD_USAGE = 0, 1, 2
MAX_LISTED = 50


def show_replay(
    store_url: str,
    state_dir: Path,
    request: ReplayRequest,
    console: Console,
    *,
    turns: int | None = None,
    as_json: bool = False,
) -> int:
    """0: reproduced to the last bit; 1: not; 2: it cannot be replayed, and one line says why.

    `turns`: how many of them to show; None: those that another objective changes most.
    """
    try:
        with (
            Store.open(store_url, create=False) as store,
            no_progress_bars(),
            nullcontext() if as_json else console.status("replaying"),
        ):
            found = replay(store, state_dir, request)
    except (StoreError, ValueError) as error:
        return _refuse(error)
    if as_json:
        print_json(found.as_json())
    else:
        print_report(render_replay(found, turns=turns), console)
    return EQUAL if found.equal else DIFFERENT


def show_candidates(
    store_url: str, state_dir: Path, console: Console, *, as_json: bool = False
) -> int:
    """Which of the last steps can be replayed, and why others cannot."""
    try:
        with Store.open(store_url, create=False) as store:
            found = list_candidates(store, state_dir, limit=MAX_LISTED)
    except (StoreError, ValueError) as error:
        return _refuse(error)
    if as_json:
        steps = [asdict(one.step) | {"problem": one.problem} for one in found]
        print_json([{k: v for k, v in one.items() if k not in _LARGE} for one in steps])
    else:
        print_report(render_candidates(found), console)
    return EQUAL


_LARGE = ("settings", "batch")


def _refuse(error: Exception) -> int:
    print(f"trainer replay: {error}", file=sys.stderr)
    return BAD_USAGE

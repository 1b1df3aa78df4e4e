"""`tracegrad ui`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tracegrad.cli.missing_dependency import naming_the_extra
from tracegrad.cli.options import with_rollout_filter
from tracegrad.cli.store_option import USAGE_ERROR, StoreOption, fail, open_store
from tracegrad.store import ALL, RolloutFilter
from tracegrad.store.read.rollouts import resolve_rollout


@with_rollout_filter
def ui_command(
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A rollout's id or its beginning: begin with that."),
    ] = None,
    store: StoreOption = None,
    which: RolloutFilter = ALL,
) -> None:
    """Look at rollouts, by keys: the list, and each one.

    The web page of the proxy shows more, at /ui."""
    # Textual draws on standard error.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        fail("ui needs a terminal; `tracegrad rollouts ls` and `show` write to pipes", USAGE_ERROR)
    with naming_the_extra("tracegrad ui", "ui"):
        from tracegrad.cli.terminal.app import RolloutBrowser
    with open_store(store) as reading:
        opened = None
        if rollout is not None:
            with reading.reading() as connection:
                opened = resolve_rollout(connection, rollout)
        RolloutBrowser(reading, which, opened).run()

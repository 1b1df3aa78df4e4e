"""`tracegrad import`: rollouts from files into the store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tracegrad.cli.commands.export import FAILED, reason_lines
from tracegrad.cli.store_option import JsonOption, StoreOption, fail, open_store, print_json
from tracegrad.text_format import format_count
from tracegrad.transfer import parquet
from tracegrad.transfer.import_rollouts import ImportStopped, RolloutImport


def import_command(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="JSONL or Parquet; - is standard input. Or a folder of Harbor's trials.",
        ),
    ],
    store: StoreOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out what is broken, and count it.")
    ] = False,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="Forget what another store trained: all turns wait here."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read exported rollouts, or conversations, into the store.

    Reading them twice is as reading them once.
    """
    with open_store(store, create=True) as writing:
        importing = RolloutImport(writing, skip_bad=skip_bad, untrained=untrained)
        try:
            for name in files:
                if Path(name).is_dir():
                    importing.folder(Path(name))
                    continue
                with _input(name) as file:
                    importing.file(name, file)
        except ImportStopped as error:
            added = importing.added
            fail(f"{error} (stored before it: {added.rollouts} new rollouts)", FAILED)
        except parquet.ParquetMissing as error:
            fail(str(error), FAILED)
    if as_json:
        print_json({**asdict(importing.added), "rejected": dict(importing.rejected)})
    else:
        for line in _import_lines(importing):
            typer.echo(line)


@contextmanager
def _input(name: str) -> Iterator[BufferedReader[Any]]:
    if name == "-":
        standard_input = BufferedReader(cast(RawIOBase, sys.stdin.buffer))
        yield standard_input
        standard_input.detach()
        return
    try:
        with Path(name).open("rb") as file:
            yield file
    except OSError as error:
        fail(f"{name}: {error.strerror}", FAILED)


def _import_lines(importing: RolloutImport) -> Iterator[str]:
    added = importing.added
    rest = [
        format_count(count, f"new {name.removesuffix('s')}")
        for name, count in asdict(added).items()
        if count and name not in ("rollouts", "known")
    ]
    total = format_count(added.rollouts + added.known, "rollout")
    yield ", ".join([f"{total}: {added.rollouts} new", *rest])
    if importing.rejected:
        yield f"left out: {reason_lines(importing.rejected)}"

"""`tracegrad export`: what is stored, out into files."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tracegrad.atomic_file import atomic_write
from tracegrad.cli.commands.export_spans import send_rollouts
from tracegrad.cli.options import with_rollout_filter
from tracegrad.cli.store_option import StoreOption, fail, open_store
from tracegrad.events import Json
from tracegrad.store import ALL, RolloutFilter
from tracegrad.text_format import format_count
from tracegrad.transfer import ExportLayout, LayoutUnknown, WriteFailed, find_layout, jsonl, parquet
from tracegrad.transfer import parquet_columns as columns
from tracegrad.transfer.export_rollouts import ExportCounts, RolloutExport

FAILED = 1

Rows = Iterator[Json]
RowWriter = Callable[[BinaryIO, Rows], object]


@with_rollout_filter
def export_command(
    store: StoreOption = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Whole rollouts, to import elsewhere (the default).")
    ] = False,
    turns: Annotated[bool, typer.Option("--turns", help="One flat object a turn.")] = False,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="NAME", help="Rows as another trainer reads them."),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option("--otlp", metavar="URL", help="Send them as spans, instead of writing."),
    ] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="With --otlp; =@FILE reads it there."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of the screen.")
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="jsonl or parquet; else by the file's ending."),
    ] = None,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Leave requests and responses out.")
    ] = False,
    trained: Annotated[
        bool | None,
        typer.Option("--trained/--not-trained", help="Only what was trained on, or was not."),
    ] = None,
    which: RolloutFilter = ALL,
) -> None:
    """Write rollouts, turns or rows of other trainers; or send spans."""
    if rollouts + turns + (layout is not None) + (otlp is not None) > 1:
        fail("--rollouts, --turns, --layout, --otlp: choose one", FAILED)
    if otlp is not None:
        if output is not None or file_format is not None:
            fail("--otlp sends; leave -o and --format out", FAILED)
        with open_store(store) as reading:
            send_rollouts(reading, which, otlp, headers or [], trained=trained, text=not no_text)
        return
    if headers:
        fail("--header goes with --otlp", FAILED)
    chosen = _layout(layout)
    write = _writer(_format(file_format, output, chosen), chosen, turns=turns)
    with open_store(store) as reading:
        export = RolloutExport(store=reading, wanted=which, trained=trained, text=not no_text)
        whole = export.turns if turns else export.rollouts
        rows = export.layout(chosen) if chosen else whole()
        with _failures():
            _write(output, write, rows)
    _print_export_counts(export.counts, output)


def _layout(name: str | None) -> ExportLayout | None:
    if name is None:
        return None
    try:
        return find_layout(name)
    except LayoutUnknown as error:
        raise typer.BadParameter(str(error.args[0]), param_hint="--layout") from None


def _format(given: str | None, output: Path | None, layout: ExportLayout | None) -> str:
    formats = ["jsonl", "parquet", *(layout.files if layout else ())]
    choices = " or ".join(formats)
    if given is not None and given not in formats:
        raise typer.BadParameter(f"{given!r}; write {choices}", param_hint="--format")
    if output is None:
        if given not in (None, "jsonl"):
            raise typer.BadParameter(f"{given} needs a file: -o FILE", param_hint="--format")
        return "jsonl"
    guessed = {"json": "jsonl"}.get(ending := output.suffix.removeprefix("."), ending)
    if given is None and guessed not in formats:
        raise typer.BadParameter(
            f"{output.name!r} does not say which; write --format {choices}", param_hint="-o"
        )
    return given or guessed


def _writer(file_format: str, layout: ExportLayout | None, *, turns: bool) -> RowWriter:
    if file_format == "jsonl":
        return _write_lines
    if layout is not None:
        if file_format in layout.files:
            return layout.files[file_format]
        return partial(parquet.write, columns=layout.columns)
    return partial(parquet.write, columns=columns.TURN if turns else columns.ROLLOUT)


def _write(output: Path | None, write: RowWriter, rows: Rows) -> None:
    if output is None:
        write(sys.stdout.buffer, rows)
        sys.stdout.buffer.flush()
        return
    with _until_told_to_end(rows) as rows, atomic_write(output) as file:
        write(file, rows)


@contextmanager
def _until_told_to_end(rows: Rows) -> Iterator[Rows]:
    """Ctrl-C and SIGTERM end it between two rows, and what was begun is taken away: raised within a
    finalizer, such as those of database connections, they would be printed and forgotten."""
    told: list[int] = []

    def note(number: int, _: object) -> None:
        told.append(number)
        signal.signal(number, before[number])  # a second one ends it at once

    def going_on() -> Rows:
        for row in rows:
            if told:
                if told[0] == signal.SIGINT:
                    raise KeyboardInterrupt
                sys.exit(128 + told[0])
            yield row

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {int(number): signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield going_on()
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _write_lines(file: BinaryIO, rows: Rows) -> None:
    for row in rows:
        file.write(jsonl.line_of(row))


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (WriteFailed, parquet.ParquetMissing) as error:
        fail(str(error), FAILED)
    except OSError as error:
        if error.errno == errno.EPIPE:  # who reads has seen enough
            raise
        fail(f"standard output: {error.strerror}", FAILED)


def _print_export_counts(counts: ExportCounts, output: Path | None) -> None:
    """On standard error: the rows may be on the other."""
    written = ", ".join(format_count(n, kind) for kind, n in counts.written.items()) or "nothing"
    where = f" to {output}" if output else ""
    typer.echo(f"exported {written}{where}", err=True)
    if counts.left_out:
        typer.echo(f"left out: {reason_lines(counts.left_out)}", err=True)


def reason_lines(reasons: Mapping[str, int]) -> str:
    lines = []
    for reason, count in sorted(reasons.items()):
        kind, colon, why = reason.partition(": ")
        lines.append(
            f"{why} ({format_count(count, kind[:-1])})" if colon else f"{reason} ({count})"
        )
    return ", ".join(lines)

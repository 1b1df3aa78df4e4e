"""`tracegrad doctor`: whether the store is whole, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tracegrad.cli.options import with_rollout_filter
from tracegrad.cli.render.console import clear_progress, show_progress
from tracegrad.cli.store_option import JsonOption, StoreOption, open_store, print_json
from tracegrad.inspect.display_text import printable
from tracegrad.store import ALL, RolloutFilter
from tracegrad.store.maintenance import DoctorReport, Finding, RolloutSelection, examine
from tracegrad.text_format import format_count

BROKEN = 1


@with_rollout_filter
def doctor_command(
    store: StoreOption = None,
    rollouts: Annotated[
        int | None,
        typer.Option(min=1, help="Read the turns of so many rollouts only, chosen by chance."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Fix what can be fixed without losing anything.")
    ] = False,
    which: RolloutFilter = ALL,
    as_json: JsonOption = False,
) -> None:
    """Check the store. Ends with 1 if something is broken, with 0 if all is well.

    The filters choose whose turns are read and rebuilt; all else is always checked whole.
    Proxies and trainers may go on meanwhile.
    """
    with open_store(store) as reading:
        report = examine(
            reading,
            selection=RolloutSelection(wanted=which),
            max_rollouts=rollouts,
            fix=fix,
            progress=_progress,
        )
        name = reading.database.describe()
    clear_progress()
    if as_json:
        print_json(_report_json(report, name))
    else:
        _print_report(report, name)
    if not report.ok:
        raise typer.Exit(BROKEN)


def _progress(what: str, turns: int) -> None:
    show_progress(f"checking {what}{f': {turns:,}' if turns else ''}")


def _report_json(report: DoctorReport, name: str) -> dict[str, object]:
    return {
        "store": name,
        "ok": report.ok,
        "rollouts": report.rollouts,
        "turns": report.turns,
        "findings": [asdict(finding) for finding in report.findings],
    }


def _print_report(report: DoctorReport, name: str) -> None:
    console = Console(highlight=False)
    for finding in report.findings:
        console.print(_line(finding))
        if finding.fix:
            console.print(Padding(Text(printable(finding.fix), style="dim"), (0, 0, 0, 4)))
    read = (
        f"{format_count(report.turns, 'turn')} of {format_count(report.rollouts, 'rollout')} read"
    )
    broken = sum(finding.count for finding in report.findings if finding.broken)
    if not report.ok:
        console.print(Text(f"{name}: {broken:,} broken; {read}"))
    elif report.findings:
        console.print(Text(f"{name}: nothing is broken; {read}"))
    else:
        console.print(Text(f"{name}: all is well; {read}"))


def _line(finding: Finding) -> Text:
    if finding.fixed:
        line = Text("fixed    ", style="green")
    elif finding.broken:
        line = Text("broken   ", style="bold red")
    else:
        line = Text("warning  ", style="yellow")
    line.append(f"{finding.check}: ", style="not bold default")
    if finding.subject:
        line.append(f"{printable(finding.subject)}: ", style="not bold cyan")
    return line.append(printable(finding.message), style="not bold default")

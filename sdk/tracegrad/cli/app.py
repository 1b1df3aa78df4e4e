"""The commands, gathered."""

from __future__ import annotations

import typer

from tracegrad.cli.commands import (
    agents,
    doctor,
    export,
    import_,
    prune,
    redact,
    rollouts,
    run,
    score,
    tasks,
    ui,
)
from tracegrad.cli.options import VersionOption
from tracegrad.environment import unread_variables
from tracegrad.proxy.cli import proxy_command

app = typer.Typer(
    name="tracegrad",
    no_args_is_help=True,
    # Plain: what Rich takes for markup, such as [redacted], would be missing in the help.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _callback(version: VersionOption = False) -> None:
    """Traces in, gradients out: look at what was captured, and serve the proxy."""
    for line in unread_variables():
        typer.echo(f"tracegrad: {line}", err=True)


app.add_typer(rollouts.app, name="rollouts")
app.add_typer(agents.app, name="agents")
app.add_typer(tasks.app, name="tasks")
app.command("proxy")(proxy_command)
app.command("run", cls=run.RunCommand, context_settings={"allow_extra_args": True})(run.run_command)
app.command("score")(score.score_command)
app.command("export")(export.export_command)
app.command("import")(import_.import_command)
app.command("prune")(prune.prune_command)
app.command("redact")(redact.redact_command)
app.command("ui")(ui.ui_command)
app.command("doctor")(doctor.doctor_command)

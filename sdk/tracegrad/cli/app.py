"""The commands, gathered."""

from __future__ import annotations

import typer

from tracegrad.cli.commands import doctor, export, import_, prune, redact, rollouts
from tracegrad.proxy.cli import proxy_command

app = typer.Typer(
    name="tracegrad",
    help="Traces in, gradients out: look at what was captured, and serve the proxy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(rollouts.app, name="rollouts")
app.command("proxy")(proxy_command)
app.command("export")(export.export_command)
app.command("import")(import_.import_command)
app.command("prune")(prune.prune_command)
app.command("redact")(redact.redact_command)
app.command("doctor")(doctor.doctor_command)

"""The `tracegrad` command."""

from __future__ import annotations

from tracegrad.cli.missing_dependency import naming_the_extra, print_version_if_asked
from tracegrad.private_files import set_private_umask


def main() -> None:
    print_version_if_asked()
    with naming_the_extra("tracegrad", "proxy"):
        from tracegrad.cli.app import app

        set_private_umask()
        app()

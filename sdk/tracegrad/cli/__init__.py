"""The `tracegrad` command."""

from __future__ import annotations

import sys

from tracegrad.private_files import set_private_umask


def main() -> None:
    try:
        from tracegrad.cli.app import app
    except ModuleNotFoundError as error:
        # The light install that agents use has no command line.
        sys.exit(f"tracegrad: {error.name} is not installed: pip install 'tracegrad[proxy]'")
    set_private_umask()
    app()

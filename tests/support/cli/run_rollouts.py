"""Runs `tracegrad rollouts …` as a user runs it, and reads what it prints as a user reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from typer.testing import CliRunner, Result

from tracegrad.cli.app import app


def run(url: str, *arguments: str, columns: int | None = 80) -> Result:
    """`columns=None` is a pipe."""
    environment = {
        "TRACEGRAD_STORE": url,
        "TERM": "dumb",
        "COLUMNS": str(columns) if columns is not None else None,
    }
    return CliRunner().invoke(app, ["rollouts", *arguments], env=environment)


def printed(url: str, *arguments: str, columns: int | None = 80) -> str:
    result = run(url, *arguments, columns=columns)
    assert result.exit_code == 0, result.output
    if "--json" not in arguments:
        assert "\x1b" not in result.stdout, "an escape code reached the terminal"
        lines = result.stdout.splitlines()
        assert all(len(line) <= (columns or len(line)) for line in lines), "a line is too long"
        assert all(line == line.rstrip() for line in lines), "a line ends in white space"
    return result.stdout


def printed_json(url: str, *arguments: str) -> Any:
    return json.loads(printed(url, *arguments, "--json"))


def in_order(text: str, expected: Iterable[str]) -> None:
    """Each of `expected` is a line, whatever its white space, and they come in this order."""
    lines = iter([" ".join(line.split()) for line in text.splitlines()])
    for each in expected:
        assert each in lines, f"{each!r} is not there, or not in this order:\n{text}"

"""The pages of the commands `tracegrad` and `trainer`, made of what `--help` says."""

from __future__ import annotations

from collections.abc import Iterator

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from tracegrad.cli.app import app as tracegrad_app
from tracegrad_trainer.cli.app import app as trainer_app

WIDTH = 100
INTRODUCTION = "This page is made of the commands themselves: `{} COMMAND --help` prints the same."


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for name, app in (("tracegrad", tracegrad_app), ("trainer", trainer_app)):
        text = page(name, get_command(app))
        files.append(File.generated(config, f"reference/{name}-commands.md", content=text))
    return files


def page(name: str, command: click.Command) -> str:
    parts = [f"# Commands of `{name}`\n", INTRODUCTION.format(name) + "\n"]
    for words, each in _commands((name,), command):
        with click.Context(each, info_name=words[-1], terminal_width=WIDTH) as context:
            context.info_name = " ".join(words)
            text = each.get_help(context).strip()
        parts.append(f"## `{' '.join(words)}`\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _commands(
    words: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield from _commands((*words, name), each)

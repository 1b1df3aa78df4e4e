"""How commands open the store, and how they end when they cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from tracegrad.jsonutil import dump_json
from tracegrad.store import (
    DEFAULT_URL,
    AmbiguousRollout,
    Store,
    StoreError,
    StoreMissing,
    UnknownRollout,
)

NO_SUCH_ROLLOUT = 1
NO_STORE = 2
USAGE_ERROR = 2

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help=f"The store; else $TRACEGRAD_STORE, else {DEFAULT_URL}.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@contextmanager
def open_store(url: str | None, *, create: bool = False) -> Iterator[Store]:
    """The store at `url`; what is wrong with it or with the question ends the command."""
    url = url or os.environ.get("TRACEGRAD_STORE") or DEFAULT_URL
    try:
        with Store.open(url, create=create) as store:
            yield store
    except (UnknownRollout, AmbiguousRollout) as error:
        fail(str(error), NO_SUCH_ROLLOUT)
    except StoreMissing as error:
        fail(f"{error}; name another with --store or TRACEGRAD_STORE", NO_STORE)
    except (StoreError, ValueError) as error:
        fail(str(error), NO_STORE)


def print_json(value: Any) -> None:
    typer.echo(dump_json(value))


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"tracegrad: {message}", err=True)
    raise typer.Exit(code)

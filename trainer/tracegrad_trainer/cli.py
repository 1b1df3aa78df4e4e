"""`trainer ...`: train on what was captured, and say what goes on."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:  # the settings import torch: seconds that `trainer status` need not wait
    from tracegrad_trainer.settings import TrainerSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; default: tracegrad.toml")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="table.name=value, as often as needed")
]

BAD_USAGE = 2


@app.callback()
def _callback() -> None:
    """Trains the model behind your agents on the turns that the proxy captured."""


@app.command()
def serve(
    config: Config = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face model folder")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="store, checkpoints, logs")] = None,
    sets: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the resolved settings and end")
    ] = False,
) -> None:
    """Start vLLM, the proxy and the FSDP ranks; train on finished groups until stopped."""
    from tracegrad_trainer import serve as serving

    named = {"model": model, "state_dir": state_dir}
    flags = [f"{name}={value}" for name, value in named.items() if value is not None]
    settings = _settings(config, [*flags, *(sets or [])])
    if dry_run:
        print(settings.model_dump_json(indent=2))
        return
    raise typer.Exit(serving.serve(settings, Console()))


@app.command()
def status(
    state_dir: Annotated[Path, typer.Option(help="the folder of `trainer serve`")] = Path(
        ".tracegrad"
    ),
    store: Annotated[str | None, typer.Option(help="store URL; default: the folder's own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """What is going on, and what happened: versions, steps, turns trained and not, and why."""
    from tracegrad.store import Store, StoreError
    from tracegrad_trainer import report
    from tracegrad_trainer import status as reading

    resolved = _resolved(state_dir)
    url = store or resolved.get("proxy", {}).get("store") or f"sqlite:///{state_dir}/store.db"
    tags = resolved.get("data", {}).get("tags", {})
    try:
        with Store.open(url, create=False) as opened:
            found = reading.status(opened, state_dir, tags=tags)
    except (StoreError, ValueError) as error:
        _fail(f"trainer status: {error}")
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        Console().print(report.render(found))


def _settings(config: Path | None, sets: list[str]) -> TrainerSettings:
    from tracegrad_trainer.settings import load

    try:
        return load(config, sets)
    except ValueError as error:
        _fail(f"trainer serve: {error}")


def _resolved(state_dir: Path) -> dict[str, Any]:
    """The settings of the last `trainer serve` in this folder, if there was one."""
    try:
        found: dict[str, Any] = json.loads((state_dir / "run" / "settings.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _fail(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    raise typer.Exit(BAD_USAGE)


def main() -> None:
    # Ctrl-C during the seconds of imports, before anything runs, ends us without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    app()


if __name__ == "__main__":
    main()

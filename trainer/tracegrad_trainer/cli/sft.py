"""The words of `trainer sft`; what it does is in `sft.run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tracegrad.cli.options import with_rollout_filter
from tracegrad.store import ALL, RolloutFilter

BAD_USAGE = 2


@with_rollout_filter
def sft(
    which: RolloutFilter = ALL,
    preset: Annotated[
        str, typer.Option(help="sft: imitate; dpo, kto: prefer better rollouts of a task to worse")
    ] = "sft",
    epochs: Annotated[int, typer.Option(min=1, help="times that everything is seen")] = 1,
    held_out: Annotated[
        float, typer.Option(min=0, max=0.99, help="share of tasks that is only measured")
    ] = 0.1,
    tokens_per_step: Annotated[
        int, typer.Option(min=2, help="tokens of an optimizer step, context included")
    ] = 16_384,
    lr: Annotated[float | None, typer.Option(min=0, help="learning rate: optim.lr")] = None,
    decay: Annotated[str, typer.Option(help="of it: linear, cosine or constant")] = "linear",
    mask_errors: Annotated[
        bool, typer.Option("--mask-errors", help="turns that went wrong are context only")
    ] = False,
    mask: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="(turn, rollout) -> whether to learn it"),
    ] = None,
    pairs: Annotated[str, typer.Option(help="dpo, of each task: best_worst or all")] = "best_worst",
    save_every: Annotated[int, typer.Option(min=1, help="steps between checkpoints")] = 100,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the folder to write the model to")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="store URL; default: the state folder's own")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file; default: tracegrad.toml")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face model folder")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="store, checkpoints, logs")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="FSDP ranks")] = None,
    seed: Annotated[int | None, typer.Option(help="of the order and of what is held out")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="table.name=value, as often as needed")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be learnt, and end")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """Learn from stored traces: no agents, no vLLM. The store stays as it is."""
    from tracegrad_trainer.config.trainer import load_settings
    from tracegrad_trainer.sft import run as sft_command
    from tracegrad_trainer.sft.config import load_sft_settings

    named = {
        "model": model,
        "state_dir": state_dir,
        "ranks": ranks,
        "seed": seed,
        "optim.lr": lr,
        "proxy.store": store,
        "objective.preset": preset,
    }
    flags = [f"{name}={value}" for name, value in named.items() if value is not None]
    try:
        settings = load_sft_settings(
            load_settings(config, flags + (sets or [])),
            which,
            preset=preset,
            epochs=epochs,
            held_out=held_out,
            tokens_per_step=tokens_per_step,
            decay=decay,
            mask_errors=mask_errors,
            mask=mask,
            pairs=pairs,
            save_every=save_every,
            out=out,
        )
    except ValueError as error:
        print(f"trainer sft: {error}", file=sys.stderr)
        raise typer.Exit(BAD_USAGE) from None
    console = Console(stderr=as_json)
    run = sft_command.show_dry_run if dry_run else sft_command.run_sft
    raise typer.Exit(run(settings, console, as_json=as_json))

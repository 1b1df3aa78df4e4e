"""`trainer ...`: train on what was captured, and report on it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, cast

import typer
from rich.console import Console

from tracegrad.cli.options import VersionOption, who_decides, with_options, with_rollout_filter
from tracegrad.environment import unread_variables
from tracegrad.private_files import set_private_umask
from tracegrad.store import ALL, RolloutFilter

if TYPE_CHECKING:  # `trainer status` need not wait for pydantic
    from tracegrad.store.types import DecisionKind
    from tracegrad_trainer.config.model_folders import FindModel
    from tracegrad_trainer.config.trainer import TrainerSettings

app = typer.Typer(
    name="trainer", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; default: tracegrad.toml")
]
# No Path: that makes nope of ./nope, which might be a name of the Hub.
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Hugging Face model folder, or a name on the Hub: Qwen/Qwen3-0.6B"
    ),
]
StateDir = Annotated[Path | None, typer.Option(help="store, checkpoints, logs")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="table.name=value, as often as needed")
]

Folder = Annotated[Path, typer.Option("--state-dir", help="the folder of `trainer serve`")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="store URL; default: the folder's own")
]
Version = Annotated[int, typer.Argument(min=0, help="as `trainer versions` shows it")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object")]

BAD_USAGE = 2


@app.callback()
def _callback(version: VersionOption = False) -> None:
    """Trains the model behind your agents on the turns that the proxy captured."""
    for line in unread_variables():
        print(f"trainer: {line}", file=sys.stderr)


@app.command()
def serve(
    config: Config = None,
    model: Model = None,
    state_dir: StateDir = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="a vLLM that runs already, in place of one of ours; once for each (vllm.urls)",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="store URL (proxy.store); one with a password: TRACEGRAD_STORE"),
    ] = None,
    sets: Sets = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="print which GPUs and memory would be used, and end"),
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="8x80GiB",
            help="--dry-run: plan for a machine with these GPUs; 8x80GiB,1024GiB: and this memory",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="--dry-run: one JSON object, the resolved settings too")
    ] = False,
) -> None:
    """Serve and train: vLLM, the proxy and FSDP ranks, until stopped."""
    if not dry_run and (gpus is not None or as_json):
        option = "--json" if gpus is None else "--gpus"
        _fail(f"trainer serve: {option} goes with --dry-run; [gpus] names the GPUs to use")
    named: dict[str, object] = {"proxy.store": store}
    if upstream:
        named["vllm.urls"] = json.dumps(upstream)
    flags = _flags(sets, model=model, state_dir=state_dir, **named)
    if dry_run:
        _show_plan(config, flags, gpus, as_json=as_json)
        return
    settings = _settings(config, flags)
    from tracegrad_trainer.cli import serve as serving

    try:
        serving.check_proxy(settings)
    except ValueError as error:
        _fail(f"trainer serve: {error}")
    raise typer.Exit(serving.serve(settings, Console()))


@app.command()
def status(
    state_dir: Folder = Path(".tracegrad"),
    store: StoreUrl = None,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="again every second, until Ctrl-C")
    ] = False,
) -> None:
    """What goes on and what happened: versions, steps, turns, reasons."""
    from tracegrad.store import Store, StoreError
    from tracegrad_trainer.cli import render_status
    from tracegrad_trainer.cli import status as reading

    def read() -> reading.RunStatus:
        return reading.collect_status(opened, state_dir, resolved=_resolved(state_dir))

    try:
        with Store.open(store or _store_url(state_dir), create=False) as opened:
            if watch:
                render_status.watch_status(read, Console(), as_json=as_json)
            else:
                render_status.print_status(read(), Console(), as_json=as_json)
    except (StoreError, ValueError) as error:
        _fail(f"trainer status: {error}")


@app.command()
def versions(
    state_dir: Folder = Path(".tracegrad"),
    store: StoreUrl = None,
    last: Annotated[int, typer.Option(min=1, help="the newest, and all that are kept")] = 20,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="the newest decisions, refused ones too")
    ] = False,
    as_json: Json = False,
) -> None:
    """How each policy version stands, and who decided what and why."""
    from tracegrad.store import Store, StoreError
    from tracegrad_trainer.cli import versions as listing

    try:
        with Store.open(store or _store_url(state_dir), create=False) as opened:
            if decisions:
                decided = opened.decisions()
                listing.print_decisions(decided, Console(), last=last, as_json=as_json)
                return
            history = opened.version_history()
    except (StoreError, ValueError) as error:
        _fail(f"trainer versions: {error}")
    listing.print_versions(history, Console(), last=last, as_json=as_json)


class Decide(Protocol):
    def __call__(
        self, kind: DecisionKind, *, version: int | None = None, training: str | None = None
    ) -> None: ...


def _decider(
    *,
    why: Annotated[str, typer.Option("--why", help="recorded with who and when")],
    state_dir: Folder = Path(".tracegrad"),
    store: StoreUrl = None,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0, help="seconds, for a trainer to act on it; 0: not at all"),
    ] = 10.0,
    as_json: Json = False,
) -> Decide:
    return partial(
        _decide, why=why, state_dir=state_dir, store=store, wait_s=wait_s, as_json=as_json
    )


with_decide = with_options(decide=_decider)


@app.command()
@with_decide
def promote(version: Version, *, decide: Decide) -> None:
    """Take a version for the good one.

    It stays on disk, candidates are compared with it, and rollbacks go to it.
    """
    decide("promote", version=version)


@app.command()
@with_decide
def rollback(
    version: Annotated[
        int | None,
        typer.Argument(help="default: the promoted one, or the last good one before", min=0),
    ] = None,
    training: Annotated[
        str, typer.Option(help="continue: from that version's checkpoint; pause: until resumed")
    ] = "continue",
    *,
    decide: Decide,
) -> None:
    """Serve an earlier version again, at once."""
    decide("rollback", version=version, training=training)


@app.command()
@with_decide
def pin(version: Version, *, decide: Decide) -> None:
    """Keep a version's weights on disk until it is unpinned."""
    decide("pin", version=version)


@app.command()
@with_decide
def unpin(version: Version, *, decide: Decide) -> None:
    """A version's weights go when they are old."""
    decide("unpin", version=version)


@app.command()
@with_decide
def pause(*, decide: Decide) -> None:
    """Train nothing until `trainer resume`; calls are served."""
    decide("pause")


@app.command()
@with_decide
def resume(*, decide: Decide) -> None:
    """Train on after a pause, or a rollback that paused training."""
    decide("resume")


@app.command()
def step(
    config: Config = None,
    model: Model = None,
    state_dir: StateDir = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps to take")] = 1,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a step")] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="what would be trained, and why the rest would not")
    ] = False,
) -> None:
    """Take optimizer steps on stored turns; no agents and no vLLM."""
    settings = _settings(config, _flags(sets, model=model, state_dir=state_dir), command="step")
    if dry:
        from tracegrad_trainer.cli import dry_run

        raise typer.Exit(dry_run.show_dry_run(settings, Console(), as_json))
    from tracegrad_trainer.cli import step as stepping

    settings = _on_training_gpus(settings, "step")
    raise typer.Exit(stepping.step(settings, steps, Console(stderr=as_json), as_json=as_json))


@app.command()
def score(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="rollouts; default: all that wait for training"),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="those too that were scored already")
    ] = False,
    config: Config = None,
    model: Model = None,
    state_dir: StateDir = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Score finished rollouts by [rewards].

    Those that have no outcome yet, and those that failed.
    """
    settings = _settings(config, _flags(sets, model=model, state_dir=state_dir), command="score")
    from tracegrad_trainer.cli import score as scoring

    console = Console(stderr=as_json)
    raise typer.Exit(scoring.score(settings, ids or [], console, again=again, as_json=as_json))


@app.command()
def workers(
    config: Config = None,
    model: Model = None,
    state_dir: StateDir = None,
    sets: Sets = None,
) -> None:
    """The workers of `trainer serve` alone, beside your own torchrun.

    Who scores rollouts, samples live prompts again, or runs the gate's tasks, until stopped.
    """
    settings = _settings(config, _flags(sets, model=model, state_dir=state_dir), command="workers")
    from tracegrad_trainer.cli import workers as working

    raise typer.Exit(working.run_workers(settings, Console()))


@app.command()
def settings(
    config: Annotated[
        Path | None,
        typer.Option("--config", "--settings", "-c", help="TOML file; default: the defaults alone"),
    ] = None,
    model: Model = None,
    state_dir: StateDir = None,
    sets: Sets = None,
) -> None:
    """Print every setting as TOML: default, type, unit, meaning."""
    from tracegrad_trainer.config import settings_file

    overrides = _flags(sets, model=model, state_dir=state_dir)
    if config is None and not overrides:
        text = settings_file.default_settings_file()
    else:
        try:
            text = settings_file.effective_settings_file(config, overrides)
        except ValueError as error:
            _fail(f"trainer settings: {error}")
    print(text, end="")


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="the folder to write")],
    config: Config = None,
    model: Model = None,
    state_dir: StateDir = None,
    step: Annotated[int | None, typer.Option(help="of this step; default: the last one")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    merged: Annotated[
        bool, typer.Option("--merged", help="LoRA: whole weights, not the adapter alone")
    ] = False,
    shard_size: Annotated[str, typer.Option(help="largest file of weights")] = "5GB",
    sets: Sets = None,
) -> None:
    """Write a checkpoint as a folder for transformers and vLLM."""
    from tracegrad_trainer.cli import export as exporting

    settings = _settings(config, _flags(sets, model=model, state_dir=state_dir), command="export")
    request = exporting.ExportRequest(
        out=out, step=step, dtype=dtype, merged=merged, shard_size=shard_size
    )
    raise typer.Exit(exporting.export(settings, request, Console()))


@app.command()
def replay(
    step: Annotated[int | None, typer.Argument(help="default: the last step")] = None,
    state_dir: Annotated[Path, typer.Option(help="the trainer's folder")] = Path(".tracegrad"),
    store: Annotated[str | None, typer.Option(help="store URL; default: the folder's own")] = None,
    preset: Annotated[str | None, typer.Option(help="another objective, on the same turns")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="objective.clip_high=0.28: changes what was recorded"),
    ] = None,
    turns: Annotated[
        bool, typer.Option("--turns", help="what each turn has to do with it")
    ] = False,
    top: Annotated[
        int | None, typer.Option(min=1, help="how many turns; default: 20, of those that change 8")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="weights to begin with; default: the step before's")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="the model, if it was moved")] = None,
    listing: Annotated[bool, typer.Option("--list", help="which steps can be replayed")] = False,
    as_json: Json = False,
) -> None:
    """Run a recorded step again, as it was or with other settings."""
    from tracegrad_trainer.cli import replay as replay_command
    from tracegrad_trainer.replay.replay import ReplayRequest

    asked = ReplayRequest(
        step=step, checkpoint=checkpoint, model=model, preset=preset, overrides=tuple(sets or ())
    )
    store, state_dir, console = store or _store_url(state_dir), state_dir.resolve(), Console()
    if listing:
        code = replay_command.show_candidates(store, state_dir, console, as_json=as_json)
    else:
        shown = top or 20 if turns and not asked.other else top
        code = replay_command.show_replay(
            store, state_dir, asked, console, turns=shown, as_json=as_json
        )
    raise typer.Exit(code)


@app.command("sft")
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
    config: Config = None,
    model: Model = None,
    state_dir: StateDir = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="FSDP ranks")] = None,
    seed: Annotated[int | None, typer.Option(help="of the order and of what is held out")] = None,
    sets: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be learnt, and end")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """Learn from stored traces: no agents, no vLLM. The store stays as it is."""
    from tracegrad_trainer.sft import run as sft_command
    from tracegrad_trainer.sft.config import check_settings_used, load_sft_settings

    named = {"optim.lr": lr, "proxy.store": store, "objective.preset": preset}
    # No vLLM runs beside it: it may have the GPUs that a file gives to that.
    named |= {"gpus.vllm": "null", "gpus.share": "null"}
    flags = _flags(sets, model=model, state_dir=state_dir, ranks=ranks, seed=seed, **named)
    try:
        check_settings_used(sets or [])
    except ValueError as error:
        _fail(f"trainer sft: {error}")
    trainer = _settings(config, flags, "sft")
    trainer = trainer if dry_run else _on_training_gpus(trainer, "sft")
    try:
        settings = load_sft_settings(
            trainer,
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
        _fail(f"trainer sft: {error}")
    console = Console(stderr=as_json)
    run = sft_command.show_dry_run if dry_run else sft_command.run_sft
    raise typer.Exit(run(settings, console, as_json=as_json))


def _decide(
    kind: DecisionKind,
    *,
    why: str,
    state_dir: Path,
    store: str | None,
    wait_s: float,
    as_json: bool,
    version: int | None = None,
    training: str | None = None,
) -> None:
    from tracegrad.store import Decision, Store, StoreError
    from tracegrad_trainer.cli import versions as deciding

    try:
        decision = Decision(
            kind=kind,
            version=version,
            training=cast(Any, training),  # it is checked there
            by=who_decides(),
            reason=why,
        )
        with Store.open(store or _store_url(state_dir), create=False) as opened:
            found = deciding.decide(opened, decision, wait_s=wait_s)
    except (StoreError, ValueError, deciding.DecisionRefused) as error:
        _fail(f"trainer {kind}: {error}")
    deciding.print_decision(found, Console(), as_json=as_json)


def _flags(sets: list[str] | None, **named: object) -> list[str]:
    """Options that are settings too, as `--set` has them, before those given by it."""
    return [f"{name}={value}" for name, value in named.items() if value is not None] + (sets or [])


def _show_plan(config: Path | None, flags: list[str], gpus: str | None, *, as_json: bool) -> None:
    from tracegrad_trainer.launch.model_outline import ModelOutlines

    with ModelOutlines() as models:
        settings = _settings(config, flags, find_model=models.find)
        from tracegrad_trainer.cli import placement  # needs torch: settings may be wrong before

        try:
            placement.show_plan(
                settings, Console(), described=gpus, as_json=as_json, models=models.names
            )
        except ValueError as error:
            _fail(f"trainer serve --dry-run: {error}")


def _settings(
    config: Path | None,
    sets: list[str],
    command: str = "serve",
    find_model: FindModel | None = None,
) -> TrainerSettings:
    from tracegrad.proxy.config import ProxySettings
    from tracegrad.settings_sources import unknown_variables
    from tracegrad_trainer.config.loading import load_settings
    from tracegrad_trainer.config.trainer import TrainerSettings

    for line in (*unknown_variables(TrainerSettings), *unknown_variables(ProxySettings)):
        print(f"trainer {command}: {line}", file=sys.stderr)
    try:
        return load_settings(config, sets, find_model)
    except ValueError as error:
        _fail(f"trainer {command}: {error}")


def _on_training_gpus(settings: TrainerSettings, command: str) -> TrainerSettings:
    from tracegrad_trainer.launch.resolve_gpus import with_training_gpus

    try:
        return with_training_gpus(settings)
    except ValueError as error:
        _fail(f"trainer {command}: {error}")


def _resolved(state_dir: Path) -> dict[str, Any]:
    """The settings of the last `trainer serve` in this folder, if there was one."""
    try:
        found: dict[str, Any] = json.loads((state_dir / "run" / "settings.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _store_url(state_dir: Path) -> str:
    """Of the last `trainer serve` or `trainer step` in this folder, or the folder's own."""
    from tracegrad.urls import unmasked

    found = _resolved(state_dir).get("proxy", {}).get("store")
    try:
        return unmasked(found) if found else f"sqlite:///{state_dir}/store.db"
    except ValueError as error:
        _fail(f"trainer: {error}, or --store")


def _fail(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    raise typer.Exit(BAD_USAGE)


def main() -> None:
    set_private_umask()
    # Parts of one's own lie where the command is run, as `python -m` finds them; behind all else,
    # so that no file there hides a library.
    sys.path.append(str(Path.cwd()))
    app()

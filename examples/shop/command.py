"""One play as a command: its options, what it prints, its exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildError

from .screen import Screen

if TYPE_CHECKING:
    from .play import Play, Result


def main(
    name: str,
    about: str | None,
    root: Path,
    load: Callable[[], Play],
    *,
    required_rise: float,
    check: Callable[[Result], str | None] = lambda _: None,
) -> int:
    """Plays once and returns the exit code: 1 if greedy success did not rise by `required_rise`, or
    `check` says what else is wrong.

    The last line that is printed is one JSON object. `load` gives the play once the proxy's address
    stands in the environment.
    """
    # Ctrl-C during the seconds of imports, when nothing runs yet, ends us without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _options(name, about)
    screen = Screen()
    # The agent reads the proxy's address when it is imported, as any agent would.
    port = options.port or find_free_port()
    os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{port}"
    # Threads of a model this small only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .play import Plan, run

    play = load()

    plan = Plan(
        port=port,
        root=root,
        state_dir=(root / time.strftime("%Y-%m-%dT%H-%M-%S")).resolve(),
        seed=options.seed,
        model_seed=options.model_seed,
        steps=options.steps,
        learning_rate=options.lr,
        shuffle_rewards=options.shuffle_rewards,
        exam_split=options.split,
        exam_tasks=options.tasks,
    )
    started = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    screen.say(f"[bold]{name}[/]: an agent gets better while it runs\n")
    try:
        result = run(play, plan, screen)
    except KeyboardInterrupt:
        screen.say("\ninterrupted; nothing is left running")
        return 130
    except ChildError as error:
        screen.say(f"[red]{name}:[/] {error}")
        return 1
    seconds = time.monotonic() - started
    screen.say("")
    screen.console.print(_table(result, plan.split_name))
    screen.say(f"\nlearning curve: {result.picture}")
    screen.say(f"look around:    .venv/bin/trainer status --state-dir {_short(plan.state_dir)}")
    store = f"sqlite:///{_short(plan.state_dir)}/store.db"
    screen.say(f"                .venv/bin/tracegrad rollouts ls --store {store}\n")
    print(json.dumps(result.summary() | {"seconds": round(seconds, 1)}), flush=True)
    if wrong := check(result):
        screen.say(f"[red]{name}:[/] {wrong}")
    risen = result.after.greedy.rate - result.before.greedy.rate
    return 1 if wrong or risen < required_rise else 0


def _options(name: str, about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument("--seed", type=int, default=0, help="of training tasks and trainer")
    parser.add_argument("--model-seed", type=int, default=0, help="of the warm start")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=None, help="0: a control, nothing is learnt")
    parser.add_argument("--shuffle-rewards", action="store_true", help="a control likewise")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks of each exam")
    parser.add_argument(
        "--split",
        choices=("held_out", "validation"),
        default="held_out",
        help="which tasks the exams are made of; settings are chosen on validation",
    )
    parser.add_argument("--port", type=int, default=None, help="of the proxy; default: a free one")
    return parser.parse_args()


def _table(result: Result, split: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name, justify in ((f"{split} success", "left"), ("before", "right"), ("after", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_row("greedy", str(result.before.greedy), str(result.after.greedy))
    table.add_row("sampled, temperature 1", str(result.before.sampled), str(result.after.sampled))
    table.add_section()
    counts = result.counts
    table.add_row("policy versions pushed", "", str(result.policy_versions))
    table.add_row("turns captured", "", str(counts.captured))
    table.add_row("turns trained", "", str(counts.trained))
    for reason, turns in sorted((counts.skipped | counts.pending).items(), key=lambda x: -x[1]):
        table.add_row(f"  not trained: {reason}", "", str(turns))
    for agent, its in result.by_agent.items():
        table.add_row(f"turns of {agent}", "", f"{its.captured}, {its.trained} trained")
    table.add_row("largest log-prob gap, on-policy", "", f"{result.gap_max:.1e}")
    total = sum(result.seconds.values()) or 1.0
    for stage, seconds in sorted(result.seconds.items(), key=lambda x: -x[1]):
        table.add_row(f"trainer: {stage}", "", f"{seconds:.1f} s  {seconds / total:.0%}")
    return table


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

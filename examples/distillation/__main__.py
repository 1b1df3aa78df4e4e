"""`make distillation`: a student imitates a teacher's traces, and then learns from its own rewards.

A small model is made from nothing. A teacher, which is right four times in five, works in its place
behind LiteLLM while the proxy records it. `trainer sft` imitates what was right; `trainer serve`
goes on from there. Held-out tasks say after each stage what the student can do. The last line is
one JSON object; the exit code is 1 if a stage did not add what it must.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.shop.demo import ROOT as MODELS
from examples.shop.screen import Screen
from rich.table import Table

from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildError

if TYPE_CHECKING:
    from .run import Result

ROOT = Path(".tracegrad/distillation")
# Of sampled success: by imitation, and by rewards after it.
REQUIRED_RISES = (0.1, 0.1)


def main() -> int:
    # Ctrl-C during the seconds of imports, when nothing runs yet, ends us without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _options()
    screen = Screen()
    port = find_free_port()
    # The agent reads the proxy's address when it is imported, as any agent would.
    os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{port}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from examples.shop.play import Plan

    from .run import LONG, SHORT, run

    form = SHORT if options.short else LONG
    folder = (ROOT / time.strftime("%Y-%m-%dT%H-%M-%S")).resolve()
    plan = Plan(port=port, root=MODELS, state_dir=folder, seed=options.seed)
    started = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    screen.say("[bold]make distillation[/]: first a teacher's traces, then its own rewards\n")
    try:
        with asyncio.Runner() as loop:
            result = run(form, plan, screen, loop)
    except KeyboardInterrupt:
        screen.say("\ninterrupted; nothing is left running")
        return 130
    except ChildError as error:
        screen.say(f"[red]distillation:[/] {error}")
        return 1
    screen.say("")
    screen.console.print(_table(result))
    wrong = problems(result.summary(), form.play.steps, short=options.short)
    for line in wrong:
        print(f"distillation: {line}", file=sys.stderr)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps(result.summary() | {"seconds": seconds}), flush=True)
    return 1 if wrong else 0


def problems(summary: dict[str, Any], steps: int, *, short: bool) -> list[str]:
    """What did not come out as it must; the short form is too short for rises."""
    found = []
    losses = summary["sft_losses"]
    if losses[-1] >= losses[0]:
        found.append(f"the held-out loss of trainer sft did not fall: {losses}")
    if summary["policy_versions"] < steps:
        found.append(f"{summary['policy_versions']} policy versions of {steps}")
    if short:
        return found
    rates = [summary[f"sampled_{when}"] for when in ("before", "sft", "after")]
    names = ("trainer sft", "trainer serve")
    for name, (low, high), least in zip(names, pairwise(rates), REQUIRED_RISES, strict=True):
        if high - low < least:
            found.append(f"{name}: sampled success rose by {high - low:+.2f}; {least:+.2f} is due")
    return found


def _table(result: Result) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("held-out success", "greedy", "sampled", "seconds", "learnt from"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    for stage in result.stages:
        exam = stage.exam
        seconds = f"{stage.seconds:.0f}"
        table.add_row(stage.name, str(exam.greedy), str(exam.sampled), seconds, stage.learnt_from)
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make distillation", description=__doc__)
    parser.add_argument("--short", action="store_true", help="what CI runs: small, few steps")
    parser.add_argument("--seed", type=int, default=0, help="of training tasks and trainer")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""`make live`: a service that people use gets better from their thumbs, and is not led astray.

People write to a chat service through the proxy; nobody opens rollouts, groups them or rewards
them. One reply in three gets a thumb, seconds to a minute later; some change their minds. `trainer
serve` learns what people like. Then somebody pays for thumbs on replies that end with a question,
whatever they answer: a guard notices, the last good version is served again, and training pauses;
it goes on when the exploit is over and what was bought is withdrawn. The last line is one JSON
object; the exit code is 1 if approval did not rise by REQUIRED_RISE in every seed, rose without
information in the thumbs, or an exploit was not caught.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from examples.shop.screen import Screen
from rich.table import Table

from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildError

if TYPE_CHECKING:
    from .run import Result

ROOT = Path(".tracegrad/live")
REQUIRED_RISE = 0.2
# Of approval, beside that of what was good: after a rollback, and of thumbs that say nothing.
CHANCE = 0.12


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _options()
    screen = Screen()
    port = find_free_port()
    # The service reads the proxy's address when it is imported, as any would.
    os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{port}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .chart import draw
    from .run import STEPS, Plan, run

    folder = (ROOT / time.strftime("%Y-%m-%dT%H-%M-%S")).resolve()
    plan = Plan(port=port, root=ROOT, state_dir=folder, steps=options.steps or STEPS)
    plans = [
        (f"seed {seed}", replace(plan, seed=seed, state_dir=folder / f"seed-{seed}"))
        for seed in range(options.seeds)
    ]
    if not options.no_control:
        control = replace(plan, shuffled=True, exploit=False, state_dir=folder / "control")
        plans.append(("thumbs that say nothing", control))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started, results = time.monotonic(), []
    try:
        with asyncio.Runner() as loop:
            for name, each in plans:
                screen.say(f"\n[bold]{name}[/]")
                results.append((name, run(each, screen, loop)))
                if not options.keep:
                    shutil.rmtree(each.state_dir / "versions", ignore_errors=True)
                    shutil.rmtree(each.state_dir / "checkpoints", ignore_errors=True)
    except KeyboardInterrupt:
        screen.say("\ninterrupted; nothing is left running")
        return 130
    except ChildError as error:
        screen.say(f"[red]live:[/] {error}")
        return 1
    picture = draw(folder / "approval.png", results[: options.seeds])
    screen.say("")
    screen.console.print(_table(results))
    for name, result in results:
        if result.caught is not None:
            screen.say(f"{name}: {result.caught.reason}")
    screen.say(f"\npicture: {picture}")
    wrong = [f"{name}: {line}" for name, result in results for line in problems(name, result)]
    for line in wrong:
        print(line, file=sys.stderr)
    print(json.dumps(_summary(results) | {"seconds": round(time.monotonic() - started)}))
    return 1 if wrong else 0


def problems(name: str, result: Result) -> list[str]:
    """What did not come out as it must."""
    found = (
        [f"{len(result.errors)} calls failed, such as {result.errors[0]}"] if result.errors else []
    )
    before, learnt = result.approval("before"), result.approval("learnt")
    assert before is not None
    assert learnt is not None
    if not name.startswith("seed"):
        if learnt - before > CHANCE:
            found.append(f"approval rose by {learnt - before:+.2f}, more than chance")
        return found
    if learnt - before < REQUIRED_RISE:
        found.append(f"approval rose by {learnt - before:+.2f}; {REQUIRED_RISE:+.2f} is expected")
    if result.caught is None:
        return [*found, "the exploit was not caught"]
    if result.caught.again is not None:
        found.append(
            f"a guard stopped training again, {result.caught.resumed_steps} steps after it went on:"
            f" {result.caught.again}"
        )
    for moment in ("rolled back", "at the end"):
        approval = result.approval(moment)
        if approval is None or approval < learnt - CHANCE:
            found.append(f"{moment}: approval {approval}, {learnt:.2f} before the exploit")
    return found


def _table(results: Sequence[tuple[str, Result]]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    columns = ("", "before", "learnt", "rolled back", "at the end", "caught after", "thumbs")
    for name in columns:
        table.add_column(name)
    for name, result in results:
        moments = [result.approval(moment) for moment in columns[1:5]]
        caught = result.caught
        table.add_row(
            name,
            *("" if approval is None else f"{approval:.2f}" for approval in moments),
            "" if caught is None else f"{caught.noticed_s:.0f} s, {caught.steps} steps",
            f"{result.thumbs:,} of {len(result.replies):,}, {result.changed} changed",
        )
    return table


def _summary(results: Sequence[tuple[str, Result]]) -> dict[str, object]:
    """`success_*`: the mean approval of seeds, before training and when all was over."""
    seeds = [result for name, result in results if name.startswith("seed")]
    return {
        "success_before": _mean(result.approval("before") for result in seeds),
        "success_after": _mean(result.approval("at the end") for result in seeds),
    } | {
        name: {
            **{moment.name: round(moment.approval, 3) for moment in result.moments},
            "caught": None if result.caught is None else asdict(result.caught),
            "replies": len(result.replies),
            "thumbs": result.thumbs,
            "changed": result.changed,
            "errors": len(result.errors),
        }
        for name, result in results
    }


def _mean(approvals: Iterable[float | None]) -> float | None:
    """None: one was not measured, because its run ended before."""
    found = list(approvals)
    known = [approval for approval in found if approval is not None]
    return round(fmean(known), 3) if known and len(known) == len(found) else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make live", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs, one after the other")
    parser.add_argument(
        "--steps", type=int, default=None, help="optimizer steps before the exploit"
    )
    parser.add_argument("--no-control", action="store_true", help="without shuffled thumbs")
    parser.add_argument(
        "--keep", action="store_true", help="weights and checkpoints of all versions"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

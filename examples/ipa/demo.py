"""`python -m ipa.demo`: tasks that sampling alone never solves, learnt from an expert's prefixes.

Three seeds of rollback and of parallel anchors must rise; GRPO from the tasks' beginning must not,
for it meets no reward, and neither must the controls: learning rate 0, and rewards shuffled within
their groups. Prints a table and one line of JSON; the exit code is 1 if one did what it must not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .run import Curve, Method, Plan, run

ROOT = Path(".tracegrad/ipa")
REQUIRED = 0.5  # success from the beginning, of what must rise
CHANCE = 0.05  # of what must not


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    method: Method
    rises: bool
    changes: tuple[tuple[str, Any], ...] = ()

    def verdict(self, curve: Curve) -> str | None:
        """What is wrong, or None."""
        if self.rises and curve.last < REQUIRED:
            return f"ended at {curve.last:.2f}; at least {REQUIRED} is expected"
        if not self.rises and curve.last > CHANCE:
            return f"ended at {curve.last:.2f}, more than chance"
        return None


VARIANTS = (
    Variant("ipa, rollback", "rollback", True),
    Variant("ipa, parallel", "parallel", True),
    Variant("grpo, no anchors", "grpo", False),
    Variant("rollback, learning rate 0", "rollback", False, (("lr", 0.0),)),
    Variant("rollback, shuffled rewards", "rollback", False, (("shuffled", True),)),
    Variant("parallel, learning rate 0", "parallel", False, (("lr", 0.0),)),
    Variant("parallel, shuffled rewards", "parallel", False, (("shuffled", True),)),
)


def measure(variant: Variant, seed: int, folder: Path, changes: dict[str, Any]) -> Curve:
    """One run, in this process."""
    # Threads of a model this small only wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    shutil.rmtree(folder, ignore_errors=True)
    return run(
        Plan(method=variant.method, folder=folder, seed=seed, **(dict(variant.changes) | changes))
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ipa.demo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many of each variant")
    parser.add_argument("--rounds", type=int, default=90, help="of sampling and training")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    given = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    started = time.monotonic()
    seeds = range(given.seeds)
    curves = _all(seeds, {"rounds": given.rounds}, given.at_once, console)
    console.print(_table(curves, seeds))
    wrong = [
        f"{variant.name}, seed {seed}: {problem}"
        for (variant, seed), curve in curves.items()
        if (problem := variant.verdict(curve)) is not None
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    found = {variant.name: [curves[variant, seed].last for seed in seeds] for variant in VARIANTS}
    print(json.dumps({"success": found, "seconds": round(time.monotonic() - started)}))
    return 1 if wrong else 0


def _all(
    seeds: Sequence[int], changes: dict[str, Any], at_once: int, console: Console
) -> dict[tuple[Variant, int], Curve]:
    # A process each: a run joins a process group of its own.
    pool = ProcessPoolExecutor(
        at_once, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    with pool:
        waiting = {
            (variant, seed): pool.submit(
                measure, variant, seed, ROOT / f"{variant.name}, {seed}".replace(", ", "-"), changes
            )
            for variant in VARIANTS
            for seed in seeds
        }
        curves = {}
        for (variant, seed), future in waiting.items():
            curves[variant, seed] = curve = future.result()
            console.print(f"{variant.name}, seed {seed}: {curve.first:.2f} → {curve.last:.2f}")
    return curves


def _table(curves: dict[tuple[Variant, int], Curve], seeds: Sequence[int]) -> Table:
    """Success from the beginning after so many rounds, the mean over the seeds."""
    rounds = [point.rounds for point in next(iter(curves.values())).points]
    shown = [i for i in range(len(rounds)) if i % max(1, len(rounds) // 8) == 0 or i == len(rounds)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("success after … rounds")
    for i in shown:
        table.add_column(str(rounds[i]), justify="right")
    table.add_column("turns sampled", justify="right")
    for variant in VARIANTS:
        mine = [curves[variant, seed] for seed in seeds]
        means = [sum(c.points[i].success for c in mine) / len(mine) for i in shown]
        turns = sum(curve.turns for curve in mine) / len(mine)
        table.add_row(variant.name, *(f"{mean:.2f}" for mean in means), f"{turns:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())

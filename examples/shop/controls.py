"""`make controls`: does success rise because of the rewards, and only because of them?

Three seeds must rise. Learning rate 0 must not: then what rose was the measurement. Shuffled
rewards (permuted within each group, so that they say nothing) must not: then what rose was the
training itself. Weights that move without a reason land somewhere all the same, a little better or
worse: so shuffled rewards may rise by up to half of what the seeds did. Each variant is a run of
the demo of its own; the exit code is 1 if one of them did what it must not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# A control may differ by chance: so many standard errors of the difference are no rise.
CHANCE = 3.0
# Of the seeds' mean rise, what a walk without a direction may come to.
DRIFT = 0.5


def too_little(rise: float, required: float) -> str | None:
    """What is wrong with a seed's rise, or None."""
    if rise >= required:
        return None
    return f"rose by {rise:+.2f}; at least {required:+.2f} is expected"


def too_much(rise: float, error: float, *, drift: float = 0.0) -> str | None:
    """What is wrong with a control's rise, or None. `error`: its standard error. `drift`: what it
    may come to besides."""
    chance = max(CHANCE * error, drift)
    return f"rose by {rise:+.2f}, more than chance ({chance:.2f})" if rise > chance else None


@dataclass(frozen=True)
class Variant:
    name: str
    rises: bool
    arguments: tuple[str, ...]
    drifts: bool = False  # its weights move, without a direction
    steps: int | None = None  # None: as many as the others


@dataclass(frozen=True)
class Measured:
    variant: Variant
    before: float  # sampled success on held-out tasks, at temperature 1
    after: float
    tasks: int
    versions: int
    greedy: tuple[float, float] = (0.0, 0.0)  # the same without chance: before and after

    @property
    def rise(self) -> float:
        return self.after - self.before

    @property
    def error(self) -> float:
        """Standard error of the rise."""
        return math.sqrt(sum(p * (1 - p) for p in (self.before, self.after)) / self.tasks)

    def verdict(self, required: float, seeds: float) -> str | None:
        """What is wrong, or None. `seeds`: their mean rise."""
        if self.variant.rises:
            return too_little(self.rise, required)
        return too_much(self.rise, self.error, drift=DRIFT * seeds if self.variant.drifts else 0.0)


def variants(
    *, seeds: int, model_seeds: bool, steps_without_learning: int | None = None
) -> list[Variant]:
    """Without `model_seeds` all of them start from the same warm-started model."""
    rising = [
        Variant(
            f"seed {seed}",
            True,
            ("--seed", str(seed), "--model-seed", str(seed if model_seeds else 0)),
        )
        for seed in range(seeds)
    ]
    return [
        *rising,
        Variant("learning rate 0", False, ("--lr", "0"), steps=steps_without_learning),
        Variant("shuffled rewards", False, ("--shuffle-rewards",), drifts=True),
    ]


def measure(variant: Variant, *, demo: str, steps: int, tasks: int, console: Console) -> Measured:
    """One run of the module `demo`, whose progress a terminal shows. RuntimeError if it ended
    without a result."""
    command = [sys.executable, "-m", demo, *variant.arguments]
    steps = steps if variant.steps is None else variant.steps
    command += ["--steps", str(steps), "--tasks", str(tasks)]
    last = ""
    with (
        console.status("begins") as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last = line.strip()
                status.update(escape(last))
    try:
        summary = json.loads(last)
    except ValueError:
        said = last or f"exit code {process.returncode}"
        raise RuntimeError(f"{variant.name}: the demo ended without a result: {said}") from None
    return Measured(
        variant,
        summary["sampled_before"],
        summary["sampled_after"],
        tasks,
        summary["policy_versions"],
        (summary["success_before"], summary["success_after"]),
    )


def run(
    chosen: Sequence[Variant],
    *,
    steps: int,
    tasks: int,
    required: float,
    console: Console,
    demo: str = "examples.shop.demo",
) -> tuple[list[Measured], list[str]]:
    """Measures all and prints a table; returns it, and what is wrong, a line each."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("variant", "before", "after", "rise", "versions", "as it must"):
        table.add_column(name)
    found = []
    for variant in chosen:
        console.print(f"{variant.name} ...")
        found.append(measure(variant, demo=demo, steps=steps, tasks=tasks, console=console))
    seeds = mean(measured.rise for measured in found if measured.variant.rises)
    wrong = []
    for measured in found:
        name, problem = measured.variant.name, measured.verdict(required, seeds)
        if problem:
            wrong.append(f"{name}: {problem}")
        table.add_row(
            name,
            f"{measured.before:.2f}",
            f"{measured.after:.2f}",
            f"{measured.rise:+.2f} ± {measured.error:.2f}",
            str(measured.versions),
            problem or "yes",
        )
    console.print(table)
    return found, wrong


def summary(found: Sequence[Measured]) -> dict[str, object]:
    """The seeds' means, and each variant's success before and after."""
    seeds = [measured for measured in found if measured.variant.rises]
    return {
        "success_before": round(mean(measured.before for measured in seeds), 3),
        "success_after": round(mean(measured.after for measured in seeds), 3),
        "greedy_before": round(mean(measured.greedy[0] for measured in seeds), 3),
        "greedy_after": round(mean(measured.greedy[1] for measured in seeds), 3),
        **{each.variant.name: [round(each.before, 3), round(each.after, 3)] for each in found},
        "policy_versions": sum(measured.versions for measured in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make controls", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form that CI runs")
    short = parser.parse_args().short
    seeds, steps, tasks, required = (1, 10, 150, 0.2) if short else (3, 32, 200, 0.4)
    chosen = variants(seeds=seeds, model_seeds=not short)
    if short:
        # An exam that rises by itself rises with shuffled rewards, too; how little it may rise is
        # bounded closer by learning rate 0, in the long form.
        chosen = [variant for variant in chosen if variant.rises or variant.drifts]
    _, wrong = run(
        chosen,
        steps=steps,
        tasks=tasks,
        required=required,
        console=Console(highlight=False),
    )
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

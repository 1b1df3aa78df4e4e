"""`make cli-agent`: mini-swe-agent, unmodified, learns small file tasks in Docker sandboxes.

Nobody imports it: each attempt is a process of its own in a container of its own, which reaches the
proxy and nothing else. All runs begin with the same model, made from nothing and warmed up on a
careless colleague's commands, which is examined before them. Three seeds must rise on held-out
tasks; learning rate 0 must not, nor may two runs on rewards by the toss of a coin on average:
one alone lands somewhere, for its weights move without a direction. The last line is one JSON
object; the exit code is 1 if one of them did what it must not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from examples.shop.controls import DRIFT, too_little, too_much
from examples.shop.screen import Screen
from rich.table import Table

from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildError

if TYPE_CHECKING:
    from examples.shop.rollouts import Score

    from .run import Result

ROOT = Path(".tracegrad/cli-agent")


@dataclass(frozen=True, slots=True)
class Form:
    """`groups`: that a step takes. `tasks`: of an exam. `required`: by what a seed must rise; None:
    so few tasks say nothing."""

    seeds: int
    steps: int
    groups: int
    tasks: int
    required: float | None
    coins: int = 0  # runs on rewards that say nothing; with them goes one at learning rate 0


LONG = Form(seeds=3, steps=8, groups=6, tasks=60, required=0.3, coins=2)
# What CI runs: that attempts in containers are trained and examined, not how far they come.
SHORT = Form(seeds=1, steps=2, groups=1, tasks=3, required=None)


@dataclass(frozen=True, slots=True)
class Variant:
    """`steps` None: as many as the seeds make."""

    name: str
    rises: bool
    seed: int = 0
    steps: int | None = None
    learning_rate: float | None = None
    coin: bool = False


def variants(form: Form) -> list[Variant]:
    seeds = [Variant(f"seed {seed}", rises=True, seed=seed) for seed in range(form.seeds)]
    if not form.coins:
        return seeds
    # Weights that do not change need no second step.
    still = Variant("learning rate 0", rises=False, steps=1, learning_rate=0.0)
    return [
        *seeds,
        still,
        *(Variant(f"coin {seed}", rises=False, seed=seed, coin=True) for seed in range(form.coins)),
    ]


def verdicts(
    results: Sequence[tuple[Variant, Score]], required: float | None, before: Score
) -> list[str | None]:
    """What is wrong with each variant, or None; coins are judged together."""

    def error(after: Sequence[Score]) -> float:
        own = sum(score.error**2 for score in after) / len(after) ** 2
        return math.sqrt(before.error**2 + own)

    rising = [after.rate - before.rate for variant, after in results if variant.rises]
    coins = [after for variant, after in results if variant.coin]
    found: list[str | None] = []
    for variant, after in results:
        rise = after.rate - before.rate
        if variant.rises:
            found.append(None if required is None else too_little(rise, required))
        elif variant.coin:
            rise, drift = mean(one.rate for one in coins) - before.rate, DRIFT * mean(rising)
            problem = too_much(rise, error(coins), drift=drift)
            found.append(problem and f"all coins together {problem}")
        else:
            found.append(too_much(rise, error([after])))
    return found


def main() -> int:
    # Ctrl-C during the seconds of imports, when nothing runs yet, ends us without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _options()
    form = SHORT if options.short else LONG
    screen = Screen()
    port = find_free_port()
    os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{port}"
    # Threads of a model this small only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from . import sandboxes
    from .run import Plan, run
    from .warm_start import SMALL, Recipe, warm_start

    spec = sandboxes.spec_of(local=options.local, image=options.image)
    folder = (ROOT / time.strftime("%Y-%m-%dT%H-%M-%S")).resolve()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started, results = time.monotonic(), []
    before: Score | None = None
    try:
        sandboxes.install(screen, spec)
        recipe = SMALL if options.short else Recipe()
        model = screen.warm_start(recipe.steps, lambda seen: warm_start(ROOT, recipe, seen))
        for variant in variants(form)[: options.variants]:
            screen.say(f"\n[bold]{variant.name}[/]")
            plan = Plan(
                port=port,
                state_dir=folder / variant.name.replace(" ", "-"),
                seed=variant.seed,
                steps=form.steps if variant.steps is None else variant.steps,
                groups=form.groups,
                learning_rate=variant.learning_rate,
                coin=variant.coin,
                held_out=form.tasks,
                examine_first=before is None,
            )
            result = run(plan, model, partial(sandboxes.opened, spec), screen)
            before = before or result.before
            results.append((variant, result))
    except KeyboardInterrupt:
        screen.say("\ninterrupted; nothing is left running")
        return 130
    except (ChildError, sandboxes.Unusable) as error:
        screen.say(f"[red]cli-agent:[/] {error}")
        return 1
    assert before is not None
    wrong = _report(before, results, form.required, screen)
    seconds = round(time.monotonic() - started)
    print(json.dumps(_summary(before, results) | {"seconds": seconds}), flush=True)
    return 1 if wrong else 0


def _report(
    before: Score,
    results: Sequence[tuple[Variant, Result]],
    required: float | None,
    screen: Screen,
) -> list[str]:
    """A table; what is wrong, a line each."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in ("held-out success", "before", "after", "versions", "attempts", "as it must"):
        table.add_column(name)
    wrong = []
    problems = verdicts([(each, result.after) for each, result in results], required, before)
    for (variant, result), problem in zip(results, problems, strict=True):
        if problem:
            wrong.append(f"{variant.name}: {problem}")
        table.add_row(
            variant.name,
            str(before),
            str(result.after),
            str(result.versions),
            f"{result.rollouts}, {result.not_scored} made again",
            problem or "yes",
        )
    screen.say("")
    screen.console.print(table)
    for line in wrong:
        print(line, file=sys.stderr)
    return wrong


def _summary(before: Score, results: Sequence[tuple[Variant, Result]]) -> dict[str, object]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    rising = [result.after.rate for variant, result in results if variant.rises]
    return {
        "success_before": round(before.rate, 3),
        "success_after": round(mean(rising), 3),
        **{variant.name: round(result.after.rate, 3) for variant, result in results},
        "policy_versions": sum(result.versions for _, result in results),
        "turns_trained": sum(result.turns_trained for _, result in results),
        "rollouts": sum(result.rollouts for _, result in results),
        "not_scored": sum(result.not_scored for _, result in results),
        # Of this process and those that it started itself; containers are the engine's.
        "cpu_seconds": round(sum(each.ru_utime + each.ru_stime for each in used)),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make cli-agent", description=__doc__)
    parser.add_argument("--short", action="store_true", help="what CI runs: one seed, few tasks")
    parser.add_argument("--local", action="store_true", help="processes instead of containers")
    parser.add_argument("--image", default=None, help="with a Python 3; default: built here")
    parser.add_argument("--variants", type=int, default=None, help="only the first so many runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

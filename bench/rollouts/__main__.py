"""Rollouts a minute, and the engine's idle share: `make bench-rollouts`; writes
docs/bench-rollouts.md.

One workload under four schedules in the same run: lockstep, a gather of each batch, this runner,
and Harbor's queue where `--harbor-python` names a Python that has it. Then commands by the runner:
what each takes beside its agent, as a process of this machine and in a Docker container, and a
thousand processes, 200 at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from bench.pages import clock, parser_of, publish
from bench.rollouts import commands, containers, schedules
from bench.rollouts.containers import Containers
from bench.rollouts.report import BARRIER, RUNNER, Found, page
from bench.rollouts.schedules import Measured
from bench.rollouts.workload import SCALE, workload
from tracegrad.runner.sandbox import SandboxError

CONCURRENCY, GROUP = 64, 8
ROUNDS = 2
# Lockstep takes so much longer that a part of the workload has to do.
LOCKSTEP_SHARE = 3


def main() -> None:
    options = _options()
    groups, rounds, few, contained, queued, at_once = (
        (16, 1, 20, 8, 60, 20) if options.quick else (96, ROUNDS, 200, 80, 1000, 200)
    )
    scale = SCALE / 5 if options.quick else SCALE
    say, load = clock(), os.getloadavg()[0]
    found = []
    for number in range(options.rounds or rounds):
        found.append(_round(groups, number, scale, options.harbor_python))
        for each in found[-1].values():
            say(f"{each.name}: {each.per_minute:.0f} rollouts a minute, idle {each.idle:.0%}")
    with tempfile.TemporaryDirectory() as folder, commands.proxy(Path(folder)):
        logs = Path(folder) / "logs"
        tasks = commands.sleepers(workload(few, 1, seed=1), scale)
        single = asyncio.run(commands.many(tasks, 4, logs))
        say(f"{len(single.ended_)} local rollouts, a few at once")
        inside = _containers(options.image, contained, scale, logs)
        said = inside if isinstance(inside, str) else f"{len(inside.warm.ended_)} in containers"
        say(said)
        # Longer ones: 200 at once are to be that many.
        tasks = commands.sleepers(workload(queued, 1, seed=2), 15 * scale)
        many = asyncio.run(commands.many(tasks, at_once, logs))
        say(f"{len(many.ended_)} local rollouts, {many.most_at_once} at once")
    publish(page(Found(found, CONCURRENCY, scale, load, single, many, at_once, inside)), options)


def _round(groups: int, seed: int, scale: float, harbor: Path | None) -> dict[str, Measured]:
    rollouts = workload(groups, GROUP, seed=seed)
    part = rollouts[: len(rollouts) // LOCKSTEP_SHARE]
    runs = [
        asyncio.run(schedules.measure("lockstep", schedules.lockstep, part, CONCURRENCY, scale)),
        asyncio.run(schedules.measure(BARRIER, schedules.gathered, rollouts, CONCURRENCY, scale)),
        asyncio.run(schedules.measure(RUNNER, schedules.runner, rollouts, CONCURRENCY, scale)),
    ]
    if harbor is not None:
        runs.append(schedules.harbor(harbor, rollouts, CONCURRENCY, scale))
    return {each.name: each for each in runs}


def _containers(image: str, count: int, scale: float, logs: Path) -> Containers | str:
    """Else why there are none."""
    try:
        return containers.measured(image, count, scale, logs)
    except (SandboxError, ValueError) as error:
        return str(error)


def _options() -> argparse.Namespace:
    parser = parser_of("rollouts", __doc__, quick="a small form, seconds")
    parser.add_argument(
        "--harbor-python", type=Path, help="a Python with harbor, measured beside the others"
    )
    parser.add_argument("--rounds", type=int, help=f"of all schedules ({ROUNDS})")
    parser.add_argument("--image", default=containers.IMAGE, help="of the containers (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
